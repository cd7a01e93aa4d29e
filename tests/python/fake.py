"""A library in libmuster's place that keeps in memory what is saved, so that muster.py is tested without a launcher."""

import ctypes

import muster


class Fake:
    """One rank's library. `asks` says what happens at a step; saves go to `saved`, by step."""

    def __init__(self, rank=0, world=1, asks=None, begin=None, fails=None):
        self.rank, self.world, self.asks, self.begin = rank, world, asks or {}, begin
        self.fails = fails or {}  # a function's name: a code
        self.memory = {}  # where a tensor's bytes were, or went, last
        self.prepared = []  # where the tensors were, each time
        self.saved, self.done, self.failed, self.declared, self.reports, self.closed = {}, [], [], [], [], 0

    def __call__(self, name, *arguments):
        if name in self.fails:
            raise muster.MusterError("as the test wants", self.fails[name])
        return getattr(self, name)(*arguments) or 0

    def muster_open(self, abi, handle, place):
        assert abi == muster.ABI
        handle._obj.value = 1
        place._obj.rank, place._obj.world, place._obj.generation = self.rank, self.world, 7

    def muster_close(self, _handle):
        self.closed += 1

    def muster_step(self, _handle, step, directive):
        directive._obj.action, directive._obj.reason = self.asks.get(step, (0, 0))

    def muster_done(self, _handle, step, action):
        self.done.append((step, action))

    def muster_failed(self, _handle, step, why):
        self.failed.append((step, why.decode()))

    def muster_report(self, _handle, metrics):
        self.reports.append(metrics and metrics._obj)

    def muster_declare(self, _handle, tensors, count, writes):
        self.declared = []
        for i in range(count):
            shape, extent = list(tensors[i].shape[: tensors[i].dims]), tensors[i].extent
            extent = list(extent[: tensors[i].dims]) if extent else shape
            offset = list(tensors[i].offset[: tensors[i].dims]) if tensors[i].offset else None
            self.declared.append((tensors[i].name.decode(), tensors[i].dtype.decode(), shape, offset, extent, tensors[i].rank))
            writes[i] = int(tensors[i].rank in (0xFFFFFFFF, self.rank)) | (2 if tensors[i].rank == 0xFFFFFFFF else 0)

    def muster_prepare(self, _handle, data, count):
        assert count == len(self.declared)
        self.prepared.append([(memory.at, memory.kind, memory.stream) for memory in data])

    def muster_look(self, _handle, first, count):
        assert count == len(self.declared)
        self.looked = []
        for (name, dtype, _, _, extent, _), at in zip(self.declared, first):
            if at:
                size = SIZES[dtype]
                for n in extent:
                    size *= n
                self.looked.append((name, ctypes.string_at(at, min(size, 4096))))

    def muster_save(self, _handle, step, data, count, blobs, blob_count, _wait, _saved):
        assert count == len(self.declared)
        tensors = {}
        for (name, dtype, shape, _, extent, rank), memory in zip(self.declared, data):
            if rank in (0xFFFFFFFF, self.rank):
                at, self.memory[name] = memory.at, (memory.kind, memory.reserved, memory.stream)
                size = SIZES[dtype]
                for n in extent:
                    size *= n
                assert at or not size, name
                tensors[name] = (dtype, shape, ctypes.string_at(at, size) if size else b"")
        content = [
            ctypes.string_at(ctypes.c_void_p.from_buffer(blobs[i], muster._Blob.data.offset).value, blobs[i].bytes)
            for i in range(blob_count)
        ]
        found = {blobs[i].name.decode(): content[i] for i in range(blob_count)}
        self.saved[step] = (tensors, found)

    def muster_restore_open(self, restore, origin):
        if self.begin is None:
            return muster.NOTHING
        step, (tensors, _) = self.begin
        restore._obj.value = 1
        origin._obj.step, origin._obj.world, origin._obj.tensors = step, 1, len(tensors)
        return 0

    def muster_restore_tensor(self, _handle, i, tensor):
        name, (dtype, shape, _) = sorted(self.begin[1][0].items())[i]
        tensor._obj.name, tensor._obj.dtype, tensor._obj.dims = name.encode(), dtype.encode(), len(shape)
        tensor._obj.shape = (ctypes.c_uint64 * len(shape))(*shape)

    def muster_restore_blob(self, _handle, name, data, length):
        blob = self.begin[1][1].get(name.decode())
        if blob is None:
            return muster.NOTHING
        self.keep = ctypes.create_string_buffer(blob, len(blob))
        data._obj.value, length._obj.value = ctypes.addressof(self.keep), len(blob)
        return 0

    def muster_restore_load(self, _handle, tensors, into, count):
        for i in range(count):
            dtype, shape, content = self.begin[1][0][tensors[i].name.decode()]
            assert (dtype, shape) == (tensors[i].dtype.decode(), list(tensors[i].shape[: tensors[i].dims]))
            if tensors[i].offset:
                # Rows alone.
                row = len(content) // shape[0]
                content = content[tensors[i].offset[0] * row :][: tensors[i].extent[0] * row]
            self.memory[tensors[i].name.decode()] = (into[i].kind, into[i].reserved, into[i].stream)
            ctypes.memmove(into[i].at, content, len(content))

    def muster_restore_close(self, _handle):
        self.closed += 1


SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8, "C64": 8}
