"""Tensors on GPUs as muster.py hands them over: a module in torch's place has tensors that say so. No GPU is needed, and
nothing is said about a real one. Run by tests/tools/check-python."""

import ctypes
import os
import sys
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "python")]

import muster  # noqa: E402
from fake import Fake  # noqa: E402

STREAMS = {0: 0x1110, 1: 0x2220}


class Device:
    def __init__(self, name):
        self.type, _, index = name.partition(":")
        self.index = int(index or 0)

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))


class Tensor:
    """Bytes of a device's, which nobody but the library looks at."""

    layout, requires_grad = "strided", False

    def __init__(self, content, device, rows=1, plain=True, moved=()):
        self.memory = ctypes.create_string_buffer(content, len(content))
        self.device, self.shape, self.dtype = Device(device), (rows, len(content) // rows), "torch.uint8"
        self.plain, self.moved = plain, moved

    @property
    def content(self):
        return self.memory.raw

    def data_ptr(self):
        return ctypes.addressof(self.memory)

    def is_contiguous(self):
        return self.plain

    def is_conj(self):
        return False

    is_neg = is_conj

    def detach(self):
        return self

    def element_size(self):
        return 1

    def __getitem__(self, rows):
        """The first row, or rows from the first on."""
        row = self.shape[-1] if len(self.shape) == 2 else 1
        end = row if rows == 0 else min(rows.stop, self.shape[0]) * row
        part = Tensor(self.content[:end], f"{self.device.type}:{self.device.index}", 1, self.plain, self.moved)
        part.shape = (row,) if rows == 0 else (end // row, *self.shape[1:])
        return part

    resolve_conj = resolve_neg = detach

    def contiguous(self):
        """Where it is."""
        return Tensor(self.content[::-1], f"{self.device.type}:{self.device.index}", self.shape[0], True, (*self.moved, "contiguous"))

    def cpu(self):
        return Tensor(self.content, "cpu", self.shape[0], self.plain, (*self.moved, "cpu"))

    def copy_(self, other):
        self.memory.raw = other.content


def like_torch(hip=None):
    module = types.ModuleType("torch")
    module.Tensor, module.strided, module.uint8 = Tensor, "strided", "torch.uint8"
    module.nn = types.SimpleNamespace(Module=type("Module", (), {}))
    module.version = types.SimpleNamespace(hip=hip)
    module.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=STREAMS[device.index]))
    module.no_grad = mock.MagicMock
    return module


class Cuda(unittest.TestCase):
    def setUp(self):
        self.addCleanup(mock.patch.stopall)

    def attach(self, fake, hip=None, **state):
        mock.patch.stopall()
        mock.patch.dict(sys.modules, torch=like_torch(hip)).start()
        mock.patch.dict(os.environ, MUSTER_CONTROL_FD="3").start()
        mock.patch.object(muster, "_loaded", fake).start()
        return muster.init(rng=False, **state)

    def saved(self, state, hip=None):
        fake = Fake()
        job = self.attach(fake, hip, extra=state)
        job.save()
        job.step()
        return fake

    def test_tensors_of_a_gpu_are_handed_over_where_they_are(self):
        state = {"first": Tensor(b"abcdef", "cuda:0", 2), "second": Tensor(b"xyz", "cuda:1"), "here": Tensor(b"1234", "cpu")}
        fake = self.saved(state)
        on = {name.rpartition(".")[2]: memory for name, memory in fake.memory.items()}
        # Each with the stream of its own device.
        self.assertEqual(on, {"first": (1, 0, 0x1110), "second": (1, 0, 0x2220), "here": (0, 0, None)})
        tensors, _ = fake.saved[0]
        self.assertEqual({name: content for name, (_, _, content) in tensors.items()}, {f"extra.{name}": t.content for name, t in state.items()})

        # And back, in place.
        fresh = {"first": Tensor(b"......", "cuda:0", 2), "second": Tensor(b"...", "cuda:1"), "here": Tensor(b"....", "cpu")}
        again = Fake(begin=(5, fake.saved[0]))
        same = dict(fresh)
        self.attach(again, extra=fresh)
        for name, tensor in state.items():
            self.assertIs(fresh[name], same[name])
            self.assertEqual(fresh[name].content, tensor.content)
        self.assertEqual(again.memory, fake.memory)

    def test_what_is_compared_of_a_gpus_tensors_is_copied_from_there(self):
        long = bytes(i % 251 for i in range(9000))
        fake = self.saved({"rows": Tensor(long, "cuda:0", 3), "row": Tensor(long, "cuda:1"), "here": Tensor(b"1234", "cpu")})
        self.assertEqual(fake.looked, [("extra.rows", long[:4096]), ("extra.row", long[:4096]), ("extra.here", b"1234")])

    def test_slots_are_registered_before_the_first_save(self):
        state = {"first": Tensor(b"abcdef", "cuda:1"), "here": Tensor(b"1234", "cpu")}
        fake = Fake()
        job = self.attach(fake, extra=state)
        job.step()
        self.assertEqual(fake.prepared, [])
        for _ in range(3):
            job.step()
        self.assertEqual(fake.prepared, [[(state["first"].data_ptr(), 1, 0x2220), (state["here"].data_ptr(), 0, None)]])
        self.assertEqual(fake.saved, {})
        # Nothing is where no tensor is on a GPU, nor where nothing is saved.
        for fake, device in ((Fake(), "cpu"), (Fake(fails={"muster_declare": muster.NO_STORE}), "cuda:0")):
            job = self.attach(fake, extra={"t": Tensor(b"abc", device)})
            with mock.patch("sys.stderr"):
                job.step(), job.step()
            self.assertEqual(fake.prepared, [])

    def test_what_is_not_in_c_order_is_copied_on_its_gpu(self):
        fake = self.saved({"t": Tensor(b"abc", "cuda:1", plain=False)})
        self.assertEqual(fake.memory, {"extra.t": (1, 0, 0x2220)})
        self.assertEqual(fake.saved[0][0]["extra.t"][2], b"cba")

    def test_tied_weights_of_a_gpu_are_saved_once(self):
        tensor = Tensor(b"abc", "cuda:0")
        self.assertEqual(list(self.saved({"a": tensor, "b": tensor}).saved[0][0]), ["extra.a"])

    def test_gpus_that_are_not_nvidias_go_through_the_hosts_memory(self):
        for hip, device in (("6.4", "cuda:0"), (None, "xpu:0")):
            fake = self.saved({"t": Tensor(b"abc", device)}, hip)
            self.assertEqual(fake.memory, {"extra.t": (0, 0, None)})
            # `contiguous` of this module turns bytes around.
            self.assertEqual(fake.saved[0][0]["extra.t"][2], b"cba")

    def test_a_save_that_fails_on_a_gpu_is_said_and_the_training_goes_on(self):
        fake = Fake(fails={"muster_save": muster.SAVE})
        job = self.attach(fake, extra={"t": Tensor(b"abc", "cuda:0")})
        job.save()
        with mock.patch("sys.stderr") as stderr:
            self.assertEqual(job.step(), 0)
        self.assertIn("could not save step 0", "".join(call.args[0] for call in stderr.write.call_args_list))


if __name__ == "__main__":
    unittest.main()
