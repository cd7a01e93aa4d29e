#!/usr/bin/env python3
"""Epoch-based image classification in the idiom of the elastic ImageNet trainers.

The device comes from LOCAL_RANK, everything else from env://. main is wrapped in @record, so that a traceback
lands in the error file that the launcher named. Whoever has the newest epoch in memory or on disk sends it to the
others after a restart. The data loader has worker processes. SIGTERM is not handled: the process dies of it.
"""

import argparse
import io
import os
import shutil
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="elastic image classification")
parser.add_argument("-j", "--workers", default=1, type=int, metavar="N", help="data loading processes (default: 1)")
parser.add_argument("--epochs", default=5, type=int, metavar="N", help="epochs in all")
parser.add_argument("-b", "--batch-size", default=32, type=int, metavar="N", help="samples per rank and step")
parser.add_argument("--lr", "--learning-rate", default=0.02, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=10, type=int, metavar="N")
parser.add_argument("--dist-backend", default="gloo", choices=["nccl", "gloo"])
parser.add_argument("--checkpoint-file", default="checkpoint.pth.tar", help="written after each epoch")
parser.add_argument("--resume", default="", metavar="PATH", help="start from this checkpoint; it must exist")
parser.add_argument("--images", default=960, type=int, help="images in the made-up data set")


class StripedImages(Dataset):
    """8 x 8 images of bright stripes: the class is the stripe's position."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 8
        image = 0.5 * torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        image[0, :, label] += 1.0
        return image, label


class State:
    """What must be the same on every rank before an epoch starts."""

    def __init__(self, model, optimizer):
        self.epoch = -1
        self.best_acc1 = 0.0
        self.model = model
        self.optimizer = optimizer

    def capture(self):
        return {
            "epoch": self.epoch,
            "best_acc1": self.best_acc1,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def apply(self, obj):
        self.epoch = obj["epoch"]
        self.best_acc1 = obj["best_acc1"]
        self.model.load_state_dict(obj["state_dict"])
        self.optimizer.load_state_dict(obj["optimizer"])


def load_checkpoint(state, checkpoint_file, resume):
    """Reads a local checkpoint where there is one; then the rank with the most epochs sends its state to all."""
    if resume:
        state.apply(torch.load(resume, map_location="cpu", weights_only=True))
    elif os.path.isfile(checkpoint_file):
        state.apply(torch.load(checkpoint_file, map_location="cpu", weights_only=True))

    epochs = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    epochs[dist.get_rank()] = state.epoch
    dist.all_reduce(epochs)
    source = int(epochs.argmax())
    if int(epochs[source]) < 0:
        return
    with io.BytesIO() as buffer:
        torch.save(state.capture(), buffer)
        blob = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    size = torch.tensor([blob.numel()], dtype=torch.int64)
    dist.broadcast(size, src=source)
    if dist.get_rank() != source:
        blob = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(blob, src=source)
    state.apply(torch.load(io.BytesIO(blob.numpy().tobytes()), map_location="cpu", weights_only=True))


def save_checkpoint(state, is_best, filename):
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)
    torch.save(state.capture(), filename + ".tmp")
    os.rename(filename + ".tmp", filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(os.path.dirname(filename), "model_best.pth.tar"))


def train(loader, model, criterion, optimizer, epoch, device, print_freq):
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device), target.to(device)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % print_freq == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {loss.item():.4f} Time {time.time() - end:.3f}", flush=True)
        end = time.time()


def validate(loader, model, device):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, target in loader:
            output = model(images.to(device))
            counts[0] += (output.argmax(1).cpu() == target).sum()
            counts[1] += target.numel()
    return 100.0 * float(counts[0] / counts[1])


@record
def main():
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if args.dist_backend == "nccl":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    dist.init_process_group(backend=args.dist_backend, init_method="env://", timeout=timedelta(seconds=60))

    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 8)).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if args.dist_backend == "nccl" else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)

    train_set = StripedImages(args.images)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, num_workers=args.workers, sampler=sampler)
    val_loader = DataLoader(StripedImages(160), batch_size=args.batch_size, num_workers=args.workers)

    state = State(model, optimizer)
    load_checkpoint(state, args.checkpoint_file, args.resume)
    start_epoch = state.epoch + 1
    print(f"=> start_epoch: {start_epoch}, best_acc1: {state.best_acc1:.2f}", flush=True)

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args.print_freq)
        acc1 = validate(val_loader, model, device)
        is_best = acc1 > state.best_acc1
        state.best_acc1 = max(acc1, state.best_acc1)
        state.epoch = epoch
        print(f" * Epoch {epoch} Acc@1 {acc1:.2f} best {state.best_acc1:.2f}", flush=True)
        if local_rank == 0 and dist.get_rank() == 0:
            save_checkpoint(state, is_best, args.checkpoint_file)


if __name__ == "__main__":
    main()
