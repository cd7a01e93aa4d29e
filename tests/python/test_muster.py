"""muster.py by itself: states to tensors and back, the loop, errors. Run by tests/tools/check-python; what needs PyTorch or libmuster.so is
skipped where they are not."""

import ast
import collections
import contextlib
import io
import json
import math
import mmap
import os
import re
import struct
import sys
import threading
import time
import unittest
import weakref
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "python")]

import muster  # noqa: E402
from fake import Fake  # noqa: E402

try:
    import torch
    import torch.distributed.tensor
except ImportError:
    torch = None
try:
    muster._library()
except muster.MusterError as error:
    WITHOUT = str(error)
else:
    WITHOUT = None

needs_torch = unittest.skipUnless(torch, "no torch")
needs_library = unittest.skipIf(WITHOUT, WITHOUT)


def attach(fake, **options):
    """A job of this library, and of no other from now on."""
    mock.patch.stopall()
    for patch in (mock.patch.object(muster, "_loaded", fake), mock.patch.dict(os.environ, MUSTER_CONTROL_FD="3")):
        patch.start()
    try:
        return muster.init(**options)
    except BaseException:
        mock.patch.stopall()
        raise


class Attached(unittest.TestCase):
    def setUp(self):
        self.addCleanup(mock.patch.stopall)

    def saved(self, **state):
        """What a save of this state leaves."""
        fake = Fake()
        job = attach(fake, **state)
        job.save()
        job.step()
        self.assertEqual(list(fake.saved), [0])
        return fake.saved[0]

    def restored(self, saved, step=5, **state):
        fake = Fake(begin=(step, saved))
        job = attach(fake, **state)
        self.assertEqual(job.start, step)
        self.assertEqual(fake.closed, 1)
        return job

    def same(self, a, b, where="state"):
        if torch is not None and isinstance(a, torch.Tensor):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), where)
            view = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (a, b)]
            self.assertTrue(torch.equal(*view), where)
        elif isinstance(a, dict):
            self.assertEqual(list(a), list(b), where)
            self.assertEqual([type(k) for k in a], [type(k) for k in b], where)
            for key in a:
                self.same(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, (list, tuple)):
            self.assertEqual((type(a), len(a)), (type(b), len(b)), where)
            for i, (x, y) in enumerate(zip(a, b)):
                self.same(x, y, f"{where}.{i}")
        elif isinstance(a, float) and math.isnan(a):
            self.assertTrue(math.isnan(b), where)
        else:
            self.assertEqual((type(a), a), (type(b), b), where)


class Plain(Attached):
    """Without torch."""

    def test_values_of_all_kinds_come_back(self):
        state = {
            "none": None, "flag": True, "int": -(2**70), "float": 0.1, "nan": math.nan, "inf": -math.inf, "text": "ä\0\"~", "bytes": b"\0\xff",
            "list": [1, [2.5, ()]], "tuple": (1, "a", (None,)), 7: {0: "int keys", "0": "and text", None: 1, (1, 2): 3}, "~": {"~": "tensor", "v": "x"},
            "counter": collections.Counter({30: 1, 80: 2}),
        }  # fmt: skip
        _, blobs = self.saved(extra=state)
        self.assertEqual(list(blobs)[-1:], ["python"])
        fresh = {"flag": False, "list": [3]}
        the_list = fresh["list"]
        self.restored(({}, blobs), extra=fresh)
        self.assertIs(fresh["list"], the_list, "in place")
        self.same({key: state[key] for key in fresh}, fresh)
        self.assertEqual(set(fresh), set(state))
        self.assertIsInstance(fresh["counter"], collections.Counter)

    def test_what_cannot_be_saved_is_named(self):
        for value, says in ((object(), "extra.a.1, a builtins.object"), ({1, 2}, "extra.a.1, a builtins.set")):
            with self.assertRaisesRegex(muster.MusterError, says):
                self.saved(extra={"a": [0, value]})
        with self.assertRaisesRegex(muster.MusterError, "cannot track number, a int"):
            attach(Fake(), number=3)
        with self.assertRaisesRegex(muster.MusterError, "has no scheduler, only extra"):
            self.restored(self.saved(extra={}), scheduler={})
        with self.assertRaisesRegex(muster.MusterError, "not saved by muster.py"):
            self.restored(({}, {}), extra={})
        with self.assertRaisesRegex(muster.MusterError, "format 2"):
            self.restored(({}, {"python": b'{"format":2}'}), extra={})
        with self.assertRaises(ValueError):
            attach(Fake(), save_every=0)

    def test_state_that_is_not_handed_over_again_is_named(self):
        saved = self.saved(a={"x": 1}, b=[2], c={})
        for rank, first, more, left in (
            (0, ("a",), (), "b, c"),
            (0, ("a",), ("c",), "b"),
            (0, ("c", "a"), ("b",), None),
            (0, ("a", "b", "c"), (), None),
            (1, ("a",), (), None),  # rank 0 says it
        ):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                job = attach(Fake(rank=rank, begin=(5, saved)), **{name: [] if name == "b" else {} for name in first})
                for name in more:
                    job.restore(**{name: [] if name == "b" else {}})
                self.assertEqual(said.getvalue(), "", "more may come")
                self.assertEqual(list(job.steps(8)), [5, 6, 7])
            self.assertEqual(said.getvalue().count("muster: "), int(left is not None), said.getvalue())
            if left:
                self.assertIn(f"the checkpoint of step 5 has state that the script has not handed over: {left}. No save", said.getvalue())
        # A job that is done saves nothing, and loses nothing.
        with contextlib.redirect_stderr(said):
            self.assertEqual(list(attach(Fake(begin=(5, saved)), a={}).steps(5)), [])
        self.assertEqual(said.getvalue(), "")

    def test_a_list_where_a_dict_was_is_replaced(self):
        extra = {"a": [1], "b": (2,)}
        self.restored(self.saved(extra={"a": {"x": 3}, "b": {"y": 4}}), extra=extra)
        self.assertEqual(extra, {"a": {"x": 3}, "b": {"y": 4}})

    def test_a_plain_run_just_steps(self):
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(muster, "_loaded", None),
            mock.patch.object(muster, "_places", side_effect=AssertionError),
        ):
            os.environ.pop("MUSTER_CONTROL_FD", None)
            extra = {"a": 1}
            job = muster.init(extra=extra, save_every=2)
            self.assertEqual((job.attached, job.start, job.rank, job.world), (False, 0, 0, 1))
            self.assertEqual(list(job.steps(5)), [0, 1, 2, 3, 4])
            job.report(loss=1.0)
            job.alive()
            job.close()

    def test_steps_save_where_they_are_told_and_leave_where_they_stop(self):
        extra = {"done": 0}
        fake = Fake(asks={3: (1, 6), 7: (2, 2)})
        job = attach(fake, extra=extra, save_every=5)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as left:
            for step in job.steps(100):
                self.assertEqual(extra["done"], step)
                extra["done"] += 1
        self.assertEqual((left.exception.code, list(fake.saved), fake.done), (0, [3, 5, 7], [(3, 1), (7, 2)]))
        self.assertIn("before step 7 (drain)", said.getvalue())
        again = {"done": -1}
        job = self.restored(fake.saved[7], step=7, extra=again)
        seen = []
        for step in job.steps(9):
            seen.append((step, again["done"]))
            again["done"] += 1
        self.assertEqual(seen, [(7, 7), (8, 8)])
        self.assertEqual(list(muster._loaded.saved), [9], "the end is saved, too")
        self.assertFalse(job.attached)
        # A job that is done has nothing left to do.
        job = self.restored(muster._loaded.saved[9], step=9, extra=again)
        self.assertEqual(list(job.steps(9)), [])
        self.assertEqual(muster._loaded.saved, {})

    def test_a_loop_for_each_epoch_is_no_loop_of_nothing(self):
        job = attach(Fake(), extra={})
        self.assertEqual(len(list(job.steps(3))), 3)
        with self.assertRaisesRegex(muster.MusterError, "all epochs together"):
            list(job.steps(3))

    def test_a_loop_of_its_own_and_a_save_on_demand(self):
        fake = Fake()
        extra = {"best": 0.0}
        job = attach(fake, extra=extra)
        for step in (0, 1, 2):
            self.assertEqual(job.step(), step)
            if step == 1:
                extra["best"] = 0.5
                job.save()
        self.assertEqual(list(fake.saved), [2], "once the step is complete")
        job.report(loss=2, lr=0.1)
        self.assertEqual((fake.reports[0].steps, fake.reports[0].training_loss, fake.reports[0].learning_rate), (2, 2.0, 0.1))
        self.assertTrue(math.isnan(fake.reports[0].compute_seconds))
        job.alive()
        self.assertIsNone(fake.reports[1])
        job.finish()
        self.assertEqual((list(fake.saved), job.attached), ([2, 3], False))
        with self.assertRaises(TypeError):
            job.report(los=1)

    def test_an_evaluation_is_saved_with_the_state_that_it_is_of(self):
        for rank, expected in ((0, {2: {"loss": 0.25, "accuracy": 1.0}, 4: None, 5: None}), (1, {2: None, 4: None, 5: None})):
            fake = Fake(rank=rank, world=2)
            job = attach(fake, extra={}, save_every=2)
            for step in job.steps(5):
                if step in (1, 2):
                    job.evaluated(loss=step / 4, bad=math.nan)
                    job.evaluated(accuracy=step)
            found = {step: blobs.get("metrics") for step, (_, blobs) in fake.saved.items()}
            self.assertEqual({step: text and json.loads(text) for step, text in found.items()}, expected)

    def test_no_store_and_saves_that_fail(self):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            job = attach(Fake(fails={"muster_declare": muster.NO_STORE}), extra={}, save_every=1)
            self.assertEqual(len(list(job.steps(4))), 4)
        self.assertEqual(said.getvalue().count("nothing will be saved"), 1)
        with contextlib.redirect_stderr(said):
            job = attach(Fake(fails={"muster_save": muster.BUSY}), extra={}, save_every=2)
            with self.assertRaises(muster.MusterError) as raised:
                list(job.steps(4))
        self.assertIn("could not save step 2", said.getvalue())
        self.assertEqual((raised.exception.code, job.attached, muster._loaded.closed), (muster.BUSY, False, 1), "nor at the end")
        # Whoever ordered a checkpoint learns why there is none, and the training goes on.
        for function, code in (("muster_declare", muster.SAVE), ("muster_declare", muster.NO_STORE), ("muster_save", muster.BUSY)):
            with contextlib.redirect_stderr(said):
                job = attach(Fake(fails={function: code}, asks={1: (1, 6)}), extra={})
                self.assertEqual([job.step() for _ in range(4)], [0, 1, 2, 3])
            self.assertEqual((muster._loaded.failed, muster._loaded.done), ([(1, "as the test wants")], []))
        # Where the job stops a failed save is no success.
        job = attach(Fake(fails={"muster_save": muster.SAVE}, asks={1: (2, 3)}), extra={})
        with self.assertRaises(muster.MusterError):
            list(job.steps(4))
        job = attach(Fake(fails={"muster_step": muster.UNDECIDED}), extra={})
        with self.assertRaises(muster.MusterError):
            list(job.steps(4))
        self.assertEqual(list(muster._loaded.saved), [0], "the state may be saved")


@needs_torch
class Tensors(Attached):
    def training(self, steps, seed=0):
        """A model, and what goes with it, after so many steps."""
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 3))
        optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.5}], amsgrad=True)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5)
        extra = {
            "ema": torch.full((3, 2), 1.5, dtype=torch.bfloat16),
            "best": math.inf,
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(7),
        }
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
            scheduler.step()
            extra["ema"] += 0.25
            extra["best"] = 1 / (steps + 1)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": extra}

    def states(self, training):
        return {name: owner if isinstance(owner, dict) else owner.state_dict() for name, owner in training.items()}

    def test_fsdp1_is_refused_by_name(self):
        inner = type("FullyShardedDataParallel", (torch.nn.Linear,), {})(2, 2)
        for model in (inner, torch.nn.Sequential(inner), torch.nn.parallel.DataParallel(inner)):
            with self.assertRaisesRegex(muster.MusterError, "cannot track model, FullyShardedDataParallel.*fully_shard"):
                attach(Fake(), model=model)

    def test_a_training_comes_back_bit_for_bit(self):
        before = self.training(5)
        tensors, blobs = self.saved(**before)
        for name in (
            "model.0.weight",
            "model.1.running_mean",
            "optimizer.state.0.exp_avg",
            "optimizer.state.3.max_exp_avg_sq",
            "extra.ema",
        ):
            self.assertIn(name, tensors)
        self.assertEqual(tensors["extra.ema"][0], "BF16")
        for steps in (0, 3):  # into optimizers that have no state yet, and that have
            after = self.training(steps, seed=1)
            weights = [p.data_ptr() for p in after["model"].parameters()]
            self.restored((tensors, blobs), **after)
            self.same(self.states(before), self.states(after))
            self.assertEqual(weights, [p.data_ptr() for p in after["model"].parameters()], "read into place")
        # And they go on alike.
        for training in (before, after):
            torch.manual_seed(9)
            training["optimizer"].zero_grad()
            training["model"](torch.randn(4, 6)).sum().backward()
            training["optimizer"].step()
            training["scheduler"].step()
        self.same(self.states(before), self.states(after))

    def test_random_numbers_go_on(self):
        torch.manual_seed(3)
        saved = self.saved(extra={})
        expected = torch.rand(4)
        job = self.restored(saved, extra={})
        torch.manual_seed(99)
        job.step()
        self.same(expected, torch.rand(4))

    def test_buffers_are_those_of_rank_0_and_wrappers_do_not_count(self):
        model = torch.nn.BatchNorm1d(4)
        wrapper = type("DistributedDataParallel", (torch.nn.Module,), {})()
        wrapper.module = model
        fake = Fake(rank=1, world=2)
        job = attach(fake, model=wrapper)
        job.save()
        job.step()
        ranks = {name: rank for name, *_, rank in fake.declared}
        expected = {
            "model.weight": 0xFFFFFFFF,
            "model.bias": 0xFFFFFFFF,
            "model.running_mean": 0,
            "model.running_var": 0,
            "model.num_batches_tracked": 0,
        }
        self.assertEqual(ranks, expected)
        tensors, blobs = fake.saved[0]
        self.assertEqual((set(tensors), list(blobs)), ({"model.weight", "model.bias"}, ["rng/1"]))

    def test_tied_weights_are_saved_once(self):
        def model(tied):
            layers = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
            if tied:
                layers[1].weight = layers[0].weight
            return layers

        tied = model(True)
        saved = self.saved(model=tied)
        self.assertEqual(list(saved[0]), ["model.0.weight"])
        for again in (model(True), model(False)):
            self.restored(saved, model=again)
            self.same(tied.state_dict(), again.state_dict())

    def test_tensors_that_do_not_lie_in_c_order(self):
        base = torch.arange(24.0).reshape(4, 6)
        state = {"t": base.t(), "half": base[:, ::2], "conj": torch.tensor([1 + 2j]).conj(), "flipped": torch.arange(3).flip(0)}
        saved = self.saved(state=state)
        into = {"t": torch.zeros(6, 4), "half": torch.zeros(8, 3)[::2], "conj": None}
        here = into["half"]
        self.restored(saved, state=into)
        self.same({key: state[key].resolve_conj().contiguous() for key in state}, {key: into[key].contiguous() for key in state})
        self.assertIs(into["half"], here, "copied to where it was")

    def test_what_tensors_cannot_be(self):
        with self.assertRaisesRegex(muster.MusterError, "cannot save state.s, a tensor of torch.float32"):
            self.saved(state={"s": torch.eye(3).to_sparse()})
        with self.assertRaisesRegex(muster.MusterError, "complex128"):
            self.saved(state={"c": torch.zeros(2, dtype=torch.complex128)})
        with self.assertRaisesRegex(muster.MusterError, "two tensors of the state are called state.a.b"):
            self.saved(state={"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})
        saved = self.saved(model=torch.nn.Linear(2, 3))
        for other, why in ((torch.nn.Linear(2, 4), "size mismatch"), (torch.nn.Sequential(torch.nn.Linear(2, 3)), "Missing key")):
            with self.assertRaisesRegex(muster.MusterError, why) as refused:
                self.restored(saved, model=other)
            self.assertEqual(refused.exception.code, muster.MISMATCH)
        before = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        saved = self.saved(optimizer=before)
        with self.assertRaises(muster.MusterError) as refused:
            self.restored(saved, optimizer=torch.optim.SGD([torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)], lr=0.1))
        self.assertEqual(refused.exception.code, muster.MISMATCH)

    def test_a_model_of_another_type_is_converted_and_said_to_be(self):
        model = torch.nn.Linear(2, 3)
        saved = self.saved(model=model)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            self.restored(saved, model=model)
        self.assertEqual(said.getvalue(), "")
        other = torch.nn.Linear(2, 3).bfloat16()
        with contextlib.redirect_stderr(said):
            self.restored(saved, model=other)
        self.assertIn("model.weight was torch.float32 and is torch.bfloat16", said.getvalue())
        self.same(model.weight.detach().bfloat16(), other.weight.detach())

    def test_a_tensor_of_another_shape_takes_the_place_and_is_said_to(self):
        def state(**shapes):
            found = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
            found["in"] = {1: [found.pop("deep")], "pair": (0, found.pop("pair"))}
            return found

        as_saved = {"d": (3,), "same": (2,), "grew": (4,), "deep": (2, 2), "pair": (1,)}
        saved = self.saved(extra=state(**as_saved))
        for rank, other, expected in (
            (0, {"grew": (0,)}, None),  # an empty one keeps a place
            (0, {"d": (5,)}, "1, the first: extra.d was of shape (3,) and is of shape (5,) now"),
            (0, {"deep": (), "pair": (2,)}, "2, the first: extra.in.1.0 was of shape (2, 2) and is of shape () now"),
            (1, {"d": (5,), "deep": ()}, None),
        ):
            extra, said = state(**{**as_saved, **other}), io.StringIO()
            before = dict(extra)
            with contextlib.redirect_stderr(said):
                attach(Fake(rank=rank, begin=(5, saved)), extra=extra)
            self.same(extra, state(**as_saved))
            self.assertEqual({name: extra[name] is before[name] for name in ("d", "same")}, {"d": "d" not in other, "same": True})
            self.assertEqual(said.getvalue().count("muster: "), int(expected is not None), said.getvalue())
            if expected:
                self.assertIn(f"muster: the checkpoint of step 5 has tensors of another shape than the script ({expected}). ", said.getvalue())

    def test_a_dtensor_is_refused(self):
        dist = torch.distributed
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        spread = dist.tensor.distribute_tensor(torch.zeros(4, 2), mesh, [dist.tensor.Shard(0)])
        with self.assertRaisesRegex(muster.MusterError, "cannot save state.d, a DTensor: hand over muster.Shard"):
            self.saved(state={"d": spread})
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        dist.fsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for state in ({"model": model, "optimizer": optimizer}, {"model": model}, {"optimizer": optimizer}):
            with self.assertRaisesRegex(muster.MusterError, "cannot track .* DTensors .fully_shard"):
                attach(Fake(), **state)
        # Where nobody saves it, it is as good as any.
        self.assertFalse(muster.init(model=model, optimizer=optimizer).attached)

    def test_a_state_that_grows_is_declared_again(self):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fake = Fake()
        job = attach(fake, model=model, optimizer=optimizer)
        counts = []
        for _ in job.steps(3):
            counts.append(len(fake.declared))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        self.assertEqual(counts, [0, 4, 4], "once the optimizer has its state")

    def test_a_state_that_changes_is_saved_as_it_is(self):
        """After the first save only what has changed is looked at; what comes of it is what a first save makes."""
        linear = torch.nn.Linear(3, 2)
        extra = {"t": torch.zeros(2), "x": {1: torch.ones(2), "k": [torch.ones(1), 5]}, "n": 1, "f": math.nan, "l": [1, (2, "a")], "none": None}
        changes = [
            lambda: extra["t"].add_(1),
            lambda: extra.update(n=2, l=[3]),
            lambda: extra.update(t=torch.full((2,), 7.0)),  # elsewhere
            lambda: extra.update(t=torch.full((3,), 7.0)),  # another shape
            lambda: extra.update(t=torch.full((3,), 7.0, dtype=torch.float64)),
            lambda: extra.update(t=torch.arange(6.0).reshape(2, 3).t()),  # not in C order
            lambda: extra["t"].mul_(2),
            lambda: extra.update(none=torch.ones(1)),  # where no tensor was
            lambda: extra.update(none=0),
            lambda: extra["x"].update(more=torch.ones(2)),
            lambda: extra["x"]["k"].append(torch.ones(3)),
            lambda: extra.update(tied=extra["t"]),
            lambda: extra.update(t=torch.zeros(2)),  # one of two that were the same
            lambda: extra.update(tied=linear.weight.detach()),
            lambda: extra.update(x=dict(reversed(extra["x"].items()))),
            lambda: extra.pop("t"),
            lambda: setattr(linear, "bias", torch.nn.Parameter(torch.ones(2))),
            lambda: None,
        ]
        fake = Fake()
        job = attach(fake, model=linear, extra=extra)
        for step, change in enumerate(changes):
            change()
            job.save()
            job.step()
            again = muster._Outline(0, {"model": linear.state_dict(), "extra": extra}, {"model": set(), "extra": set()})
            tensors, blobs = fake.saved[step]
            self.assertEqual(blobs["python"].decode(), f'{{"format":1,"state":{again.text()}}}', step)
            expected = {leaf.name: muster._plain(tensor) for leaf, tensor in zip(again.leaves, again.tensors)}
            found = {name: (shape, content) for name, (_, shape, content) in tensors.items()}
            wanted = {name: (list(t.shape), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for name, t in expected.items()}
            self.assertEqual(found, wanted, step)

    def test_tensors_that_go_are_not_kept(self):
        state = {"t": torch.zeros(4)}
        job = attach(Fake(), state=state)
        for _ in range(3):
            job.save()
            job.step()
        gone = weakref.ref(state["t"])
        state["t"] = torch.zeros(4)
        self.assertIsNone(gone())

    def test_what_ranks_have_alike_is_compared(self):
        rows = torch.arange(6000.0).reshape(3, 2000)
        state = {
            "long": rows, "short": torch.ones(3), "turned": rows.t(), "scalar": torch.tensor(3.0), "mine": muster.Shard(rows, (3, 2000), (0, 0)),
            "empty": torch.empty(0, 3),
        }  # fmt: skip
        fake = Fake()
        job = attach(fake, model=torch.nn.BatchNorm1d(2), state=state)
        job.save()
        job.step()
        looked = dict(fake.looked)
        of = {name: tensor.contiguous().numpy().tobytes()[:4096] for name, tensor in state.items() if name not in ("mine", "empty")}
        self.assertEqual({name: looked[f"state.{name}"] for name in of}, of)
        # What is a rank's own, or rank 0's for all.
        self.assertEqual(set(looked) - {f"state.{name}" for name in of} - {"state.empty"}, {"model.weight", "model.bias"})

    def test_fifteen_thousand_tensors_hardly_hold_a_save_up(self):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4)) for _ in range(5000)])
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones(4)
        optimizer.step()
        fake = Fake()
        fake.muster_save = lambda *_: None
        job = attach(fake, model=model, optimizer=optimizer)
        took = []
        for _ in range(6):
            job.save()
            began = time.process_time()
            job.step()
            took.append(time.process_time() - began)
        self.assertEqual(len(fake.declared), 20000)
        # 20 to 40 ms, and once ten times that; on a machine that does much else, ten times as long.
        self.assertLess(min(took[1:]), 0.4, took)

    def test_an_optimizer_of_other_parameters_is_refused(self):
        model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
        wrong = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        for state in ({"model": model, "optimizer": wrong}, {"optimizer": wrong, "model": model}):
            with self.assertRaisesRegex(muster.MusterError, "optimizer has 2 of 4 parameters.* shape .3, 2. in its group 0") as raised:
                attach(Fake(), **state)
            self.assertEqual(raised.exception.code, muster.MISMATCH)
        # All of these have theirs somewhere in what is handed over.
        frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        raw = torch.ones(3, requires_grad=True)
        compiled = torch.compile(model, backend="eager")
        for state in (
            {"model": model, "head": other, "optimizer": wrong},
            {"model": torch.nn.Sequential(model, frozen), "optimizer": torch.optim.SGD(model.parameters(), lr=1)},
            {"model": model, "state": {"raw": raw}, "optimizer": torch.optim.SGD([raw, model.weight], lr=1)},
            {"model": compiled, "optimizer": torch.optim.SGD(compiled.parameters(), lr=1)},
            {"model": torch.nn.parallel.DataParallel(model), "optimizer": torch.optim.SGD(model.parameters(), lr=1)},
            {"optimizer": wrong},
        ):
            attach(Fake(), **state)

    def test_the_state_of_another_kind_of_optimizer_is_refused(self):
        model = torch.nn.Linear(2, 2)
        saved = self.saved(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        with self.assertRaisesRegex(muster.MusterError, "has no momentum, .*which SGD needs") as raised:
            self.restored(saved, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1, momentum=0.9))
        self.assertEqual(raised.exception.code, muster.MISMATCH)
        self.restored(saved, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1))

    def test_shards(self):
        whole = torch.arange(12.0).reshape(6, 2)
        saved = self.saved(state={"w": muster.Shard(whole, (6, 2), (0, 0))})
        part = torch.zeros(2, 2)
        self.restored(saved, state={"w": muster.Shard(part, (6, 2), (3, 0))})
        self.same(part, whole[3:5])
        job = attach(Fake(world=2), state={"w": muster.Shard(part, (4, 2), (0, 0))})
        job.save()
        with self.assertRaisesRegex(muster.MusterError, "init_process_group"):
            job.step()


@needs_library
class Sampling(unittest.TestCase):
    def sampler(self, rank=0, world=1, batch=8, **more):
        return muster.ElasticSampler(range(100), batch, seed=5, rank=rank, world=world, **more)

    def test_an_epoch_has_each_sample_once_in_any_worlds(self):
        state, seen, batches = None, [], 0
        for world in (3, 1, 2, 5):
            steps = 3
            after = []
            for rank in range(world):
                sampler = self.sampler(rank, world, drop_last=False)
                if state:
                    sampler.load_state_dict(state)
                self.assertEqual(len(sampler), 13 - batches)
                for _, batch in zip(range(steps), sampler):
                    seen += batch
                    sampler.advance()
                after.append(sampler.state_dict())
            self.assertTrue(all(a == after[0] for a in after))
            state, batches = after[0], batches + steps
        last = self.sampler(drop_last=False)
        last.load_state_dict(state)
        seen += [i for batch in last for i in batch]
        self.assertEqual(sorted(seen), list(range(100)))

    def test_reading_ahead_is_not_training(self):
        sampler = self.sampler()
        batches = list(sampler)
        self.assertEqual((len(batches), len(sampler), sampler.epoch), (12, 12, 0))
        for _ in range(5):
            sampler.advance()
        again = self.sampler()
        again.load_state_dict(sampler.state_dict())
        self.assertEqual(list(again), batches[5:])
        # The next epoch is another order; the first one is read to its end though not all of it is done.
        self.assertNotEqual(next(iter(sampler)), batches[0])
        for _ in range(8):
            sampler.advance()
        self.assertEqual(sampler.epoch, 1)

    def test_set_epoch(self):
        sampler, other = self.sampler(), self.sampler()
        first = list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        other.set_epoch(1)
        self.assertEqual(list(other), second)
        other.set_epoch(0)
        self.assertEqual(list(other), first)
        resumed = self.sampler()
        for _ in range(4):
            resumed.advance()
        resumed.set_epoch(0)
        self.assertEqual(list(resumed), first[4:], "in the middle of the epoch")

    def test_by_rank_and_too_small(self):
        sampler = self.sampler(1, 4, batch=3, per_rank=True)
        self.assertEqual({len(batch) for batch in sampler}, {3})
        self.assertEqual(len(sampler), 100 // 12)
        with self.assertRaisesRegex(ValueError, "per_rank"):
            self.sampler(0, 4, batch=3)
        with self.assertRaisesRegex(RuntimeError, "drop_last"):
            list(self.sampler(0, 5, batch=8, drop_last=False))

    @needs_torch
    def test_a_data_loader_takes_it(self):
        data = torch.utils.data.TensorDataset(torch.arange(100))
        sampler = self.sampler()
        expected = list(self.sampler())
        for workers in (0, 1):
            loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
            self.assertEqual(len(loader), 12)
            sampler.set_epoch(0)
            self.assertEqual([batch.tolist() for (batch,) in loader], expected)

    def test_a_job_moves_it(self):
        fake = Fake(asks={3: (2, 1)})
        sampler = self.sampler()
        library = muster._library()
        both = mock.Mock(side_effect=lambda name, *a: (library if "sampler" in name else fake)(name, *a))
        self.addCleanup(mock.patch.stopall)
        job = attach(both, sampler=sampler)
        batches = []
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            for batch in sampler:
                job.step()
                batches.append(batch)
        self.assertEqual(len(batches), 3)
        resumed = Fake(begin=(3, fake.saved[3]))
        both = mock.Mock(side_effect=lambda name, *a: (library if "sampler" in name else resumed)(name, *a))
        sampler = self.sampler()
        attach(both, sampler=sampler)
        self.assertEqual(batches + list(sampler), list(self.sampler()))


@needs_library
class Page(unittest.TestCase):
    """The library itself, on a control page as a launcher makes it; its words are those of protocol/src/control.rs."""

    STOP, REASON, PROGRESS, ACK, LINKED, METRICS, ASK, GIVEN = 128, 144, 256, 264, 272, 1032, 1552, 1696

    def setUp(self):
        fd = os.memfd_create("page")
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, 4096)
        self.page = mmap.mmap(fd, 4096)
        self.page[:16] = b"MUSTERCP" + struct.pack("<Q", 1)
        patch = mock.patch.dict(
            os.environ, MUSTER_CONTROL_FD=str(fd), RANK="1", WORLD_SIZE="3", MASTER_ADDR="::1", MASTER_PORT="1", MUSTER_GENERATION="4"
        )
        patch.start()
        self.addCleanup(patch.stop)

    def word(self, at, value=None):
        if value is not None:
            self.page[at : at + 8] = struct.pack("<Q", value)
        return struct.unpack("<Q", self.page[at : at + 8])[0]

    def test_steps_go_over_the_page(self):
        job = muster.init(extra={"a": 1})
        self.assertEqual((job.rank, job.world, job.generation, job.start, job.attached), (1, 3, 4, 0, True))
        self.assertEqual((self.word(self.LINKED), job.step(), self.word(self.PROGRESS)), (1, 0, 1))
        job.report(loss=0.25)
        self.assertEqual((self.word(self.METRICS + 8), struct.unpack("<d", self.page[self.METRICS + 16 : self.METRICS + 24])[0]), (3, 0.25))
        with self.assertRaisesRegex(muster.MusterError, "one session per worker") as twice:
            muster.init()
        self.assertEqual(twice.exception.code, muster.ENVIRONMENT)
        self.word(self.REASON, 4)
        self.word(self.STOP, 2 << 2 | 2)

        def refuse():
            while not self.word(self.ASK):
                time.sleep(0.001)
            self.word(self.GIVEN, self.word(self.ASK) << 8 | 2)  # no store

        launcher = threading.Thread(target=refuse)
        launcher.start()
        with self.assertRaises(SystemExit):
            list(iter(job.step, None))
        launcher.join()
        self.assertEqual((self.word(self.PROGRESS), self.word(self.ACK)), (3, 3))
        job.close()
        self.assertEqual(self.word(self.LINKED), 0)

    def test_variables_that_make_no_sense_are_named(self):
        for name, value in (("RANK", "x"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "0"), ("MUSTER_CONTROL_FD", "77777")):
            with mock.patch.dict(os.environ, {name: value}), self.assertRaisesRegex(muster.MusterError, name):
                muster.init()
        with mock.patch.dict(os.environ, MUSTER_RESTORE="abc"), self.assertRaisesRegex(muster.MusterError, 'MUSTER_RESTORE is "abc"'):
            muster.init(extra={})


class Library(unittest.TestCase):
    def load(self, path):
        with mock.patch.dict(os.environ, MUSTER_LIBRARY=path):
            return muster._Library()

    def test_what_is_not_the_library_is_refused_with_the_remedy(self):
        for path in ("/nowhere/libmuster.so", os.path.abspath(__file__)):
            with self.assertRaisesRegex(muster.MusterError, r"cargo build --release -p muster-capi.*MUSTER_LIBRARY"):
                self.load(path)
        with self.assertRaisesRegex(muster.MusterError, "no library of Muster"):
            with open("/proc/self/maps", encoding="utf-8") as maps:
                libc = next(line.split()[-1] for line in maps if "libc.so" in line)
            self.load(libc)

    @needs_library
    def test_another_abi_is_refused(self):
        with mock.patch.object(muster, "ABI", 99), self.assertRaisesRegex(muster.MusterError, "wants 99: take both from one release"):
            muster._Library()

    @needs_library
    def test_errors_come_with_their_text(self):
        with self.assertRaisesRegex(muster.MusterError, "no state of a sampler") as failed:
            muster.ElasticSampler(10, 2).load_state_dict({"state": bytes(40)})
        self.assertEqual(failed.exception.code, muster.ARGUMENT)

    def test_it_is_the_header(self):
        with open(os.path.join(ROOT, "runtime/capi/include/muster.h"), encoding="utf-8") as file:
            header = file.read()
        header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
        self.assertEqual(int(re.search(r"MUSTER_ABI (\d+)u", header)[1]), muster.ABI)
        functions = set(re.findall(r"\b(muster_\w+)\(", header))
        self.assertEqual(functions, set(muster._FUNCTIONS) | {"muster_abi", "muster_error"})
        for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", header, flags=re.S):
            fields = re.findall(r"(\w+);", body)
            ours = [value for value in vars(muster).values() if getattr(value, "__name__", "") == name]
            self.assertEqual([f for f, _ in ours[0]._fields_], fields, name)
        for name, number in re.findall(r"MUSTER_(\w+) = (-?\d+)", header):
            ours = vars(muster)["_" + name if name in ("CONTINUE", "CHECKPOINT", "STOP", "HOST", "CUDA", "WRITES", "LOOKS") else name]
            self.assertEqual(ours, int(number), name)

    def test_it_is_python_3_9(self):
        with open(muster.__file__, encoding="utf-8") as file:
            ast.parse(file.read(), feature_version=(3, 9))

    def test_three_lines_make_the_example(self):
        with open(os.path.join(ROOT, "examples/three_lines.py"), encoding="utf-8") as file:
            code = file.read().split('"""', 2)[2]
        ours = [line.strip() for line in code.splitlines() if re.search(r"\bmuster\b|\bjob\b", line)]
        self.assertEqual([line.split("(")[0] for line in ours], ["import muster", "job = muster.init", "for step in job.steps"])


if __name__ == "__main__":
    unittest.main()
