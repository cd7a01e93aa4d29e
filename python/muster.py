"""Muster for training scripts in Python: the agreed stop step, checkpoints without a stall, the elastic sampler.

    import muster

    job = muster.init(model=model, optimizer=optimizer, save_every=100)
    for step in job.steps(10_000):
        ...                                     # forward, backward, optimizer.step()

`init` puts back what the job saved last, `steps` goes on from there. Where the job has to stop (a node is drained or
reclaimed, another joins), all ranks save at one step and exit, and no step is lost. Without `muster run` all of this
does nothing. The guide: docs/python.md.

One file, which needs `libmuster.so` (`cargo build --release -p muster-capi`) and nothing else; of torch and numpy it
uses what the script has imported.
"""

from __future__ import annotations

import base64
import collections
import ctypes
import functools
import json
import math
import os
import sys
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple, Optional

__all__ = ["init", "Job", "ElasticSampler", "Shard", "MusterError"]

ABI = 2  # MUSTER_ABI of runtime/capi/include/muster.h

OK, NOTHING = 0, 1
ARGUMENT, ENVIRONMENT, STEP, UNDECIDED, NO_STORE, BUSY, SAVE, PLAN, RESTORE, MISMATCH, DAMAGED, PANIC = range(-1, -13, -1)
_CONTINUE, _CHECKPOINT, _STOP = 0, 1, 2
_REASONS = ("unknown", "preemption", "drain", "SIGTERM", "a join", "interrupted", "checkpoint")
_ALL_RANKS = 0xFFFFFFFF
_HOST, _CUDA = 0, 1  # muster_memory_kind
_WAIT = 600.0  # seconds for a slot
_WRITES, _LOOKS = 1, 2  # what muster_declare wants of a tensor
_LOOK = 4096  # MUSTER_LOOK: bytes that are compared between ranks


class MusterError(RuntimeError):
    """What went wrong, and what helps. `code` is one of this module's numbers (`BUSY`, `DAMAGED`, …), which are those of muster.h."""

    def __init__(self, text: str, code: int = ARGUMENT) -> None:
        super().__init__(text)
        self.code = code


# ---- the library ----------------------------------------------------------------------------------------------------

_u8, _u32, _u64, _i32, _size, _text = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
_f64, _ptr, _to = ctypes.c_double, ctypes.c_void_p, ctypes.POINTER


def _struct(name: str, /, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Place = _struct("muster_place", rank=_u32, world=_u32, local_rank=_u32, local_world=_u32, generation=_u64, restart=_u64)
_Directive = _struct("muster_directive", action=_i32, reason=_u32, deadline=_u64)
_METRICS = (
    "training_loss", "samples_per_second", "learning_rate", "loss_scale",
    "data_seconds", "compute_seconds", "communication_seconds", "gradient_sync_seconds",
)  # fmt: skip
_Metrics = _struct("muster_metrics", steps=_u64, **{name: _f64 for name in _METRICS})
_Tensor = _struct("muster_tensor", name=_text, dtype=_text, dims=_u32, rank=_u32, shape=_to(_u64), offset=_to(_u64), extent=_to(_u64))
_Memory = _struct("muster_memory", at=_ptr, kind=_u32, reserved=_u32, stream=_ptr)
_Blob = _struct("muster_blob", name=_text, data=_text, bytes=_size)
_Saved = _struct("muster_saved", bytes=_u64, copied=_f64, waited=_f64)
_Origin = _struct("muster_origin", step=_u64, world=_u32, reserved=_u32, tensors=_size)
_SamplerConfig = _struct("muster_sampler_config", samples=_u64, seed=_u64, batch=_u64, epoch=_u64, per_rank=_u32, drop_tail=_u32)
_Batch = _struct("muster_batch", epoch=_u64, samples=_u64, count=_size)

_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # arguments; what has no name here returns muster_code
    "muster_open": (_u32, _to(_ptr), _to(_Place)),
    "muster_close": (_ptr,),
    "muster_step": (_ptr, _u64, _to(_Directive)),
    "muster_done": (_ptr, _u64, _i32),
    "muster_failed": (_ptr, _u64, _text),
    "muster_report": (_ptr, _to(_Metrics)),
    "muster_declare": (_ptr, _to(_Tensor), _size, _to(_u8)),
    "muster_prepare": (_ptr, _to(_Memory), _size),
    "muster_look": (_ptr, _to(_ptr), _size),
    "muster_save": (_ptr, _u64, _to(_Memory), _size, _to(_Blob), _size, _f64, _to(_Saved)),
    "muster_restore_open": (_to(_ptr), _to(_Origin)),
    "muster_restore_tensor": (_ptr, _size, _to(_Tensor)),
    "muster_restore_blob": (_ptr, _text, _to(_ptr), _to(_size)),
    "muster_restore_load": (_ptr, _to(_Tensor), _to(_Memory), _size),
    "muster_restore_close": (_ptr,),
    "muster_sampler_open": (_to(_ptr), _to(_SamplerConfig), _text),
    "muster_sampler_next": (_ptr, _u32, _u32, _to(_u64), _size, _to(_Batch)),
    "muster_sampler_state": (_ptr, _text, _to(_u64), _to(_u64)),
    "muster_sampler_close": (_ptr,),
}
_CLOSES = [name for name in _FUNCTIONS if name.endswith("_close")]
_BUILD = "build it with `cargo build --release -p muster-capi`, and set MUSTER_LIBRARY to it or copy it beside muster.py"


def _places() -> list[str]:
    """Where the library may be; what MUSTER_LIBRARY names is not looked for elsewhere."""
    named = os.environ.get("MUSTER_LIBRARY")
    if named:
        return [named]
    here = os.path.dirname(os.path.realpath(__file__))
    above = os.path.join(os.path.dirname(here), "target")
    return [os.path.join(folder, "libmuster.so") for folder in (here, os.path.join(above, "release"), os.path.join(above, "debug"))]


class _Library:
    """The functions of libmuster.so; those that return a code raise what is negative."""

    def __init__(self) -> None:
        places = _places()
        path = next((place for place in places if os.path.exists(place)), None)
        if path is None:
            raise MusterError(f"libmuster.so is not there: {_BUILD} (looked at {', '.join(places)})", ENVIRONMENT)
        try:
            self._lib = ctypes.CDLL(path)
            abi = self._lib.muster_abi
        except (OSError, AttributeError) as error:
            raise MusterError(f"{path} is no library of Muster for this machine: {_BUILD} ({error})", ENVIRONMENT) from error
        abi.restype, abi.argtypes = _u32, (_to(_text),)
        release = _text()
        found = abi(ctypes.byref(release))
        if found != ABI:
            known = (release.value or b"?").decode()
            text = f"{path} (release {known}) has ABI {found}, this muster.py wants {ABI}: take both from one release"
            raise MusterError(text, ENVIRONMENT)
        self._lib.muster_error.restype = _text
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._lib, name, None)
            if function is None:
                raise MusterError(f"{path} has no {name}, which this muster.py wants: take both from one release", ENVIRONMENT)
            function.argtypes = arguments
            function.restype = None if name in _CLOSES else _i32

    def __call__(self, name: str, *arguments: Any) -> int:
        code = getattr(self._lib, name)(*arguments)
        if code is not None and code < 0:
            raise MusterError((self._lib.muster_error() or b"").decode(errors="replace"), code)
        return OK if code is None else code


_loaded: Optional[_Library] = None


def _library() -> _Library:
    global _loaded
    if _loaded is None:
        _loaded = _Library()
    return _loaded


def _numbers(values: Optional[Sequence[int]]) -> Any:
    return None if values is None else (_u64 * len(values))(*values)


# ---- tensors --------------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """This rank's part of a tensor that is spread over the ranks: a box that begins at `offset` in the whole of `shape`.

    In a state it stands where a tensor would. The parts of all ranks together are the whole; several ranks may have
    the same one. On restoring each rank gets the part that its own says, whatever the ranks before had.
    """

    tensor: Any
    shape: Sequence[int]
    offset: Sequence[int]


_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
}  # fmt: skip
_NAMES = {saved: name for name, saved in _DTYPES.items()}


def _torch() -> Any:
    return sys.modules.get("torch")


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@functools.lru_cache(maxsize=4096)
def _is_kind_of_torch(kind: type) -> bool:
    torch = _torch()
    return torch is not None and issubclass(kind, torch.Tensor)


def _is_torch(value: Any) -> bool:
    return _is_kind_of_torch(type(value))


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Shard) or _is_torch(value) or _is_numpy(value)


def _is_spread(tensor: Any) -> bool:
    """Whether it is a DTensor, of which a rank has a part."""
    return hasattr(tensor, "placements")


def _dtype(tensor: Any) -> Optional[str]:
    if _is_torch(tensor):
        return _DTYPES.get(str(tensor.dtype).rpartition(".")[2]) if tensor.layout is _torch().strided else None
    return _DTYPES.get(tensor.dtype.name) if tensor.dtype.isnative else None


def _on_cuda(tensor: Any) -> bool:
    """Whether it is on one of NVIDIA's GPUs; torch calls AMD's so, too."""
    return _is_torch(tensor) and tensor.device.type == "cuda" and getattr(_torch().version, "hip", None) is None


def _is_plain(tensor: Any) -> bool:
    """Whether its memory is what is saved: this process's or a CUDA device's, in C order."""
    if _is_torch(tensor):
        reached = tensor.device.type == "cpu" or _on_cuda(tensor)
        return reached and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return bool(tensor.flags.c_contiguous)


def _plain(tensor: Any) -> Any:
    """The same in such memory."""
    if _is_numpy(tensor):
        return sys.modules["numpy"].ascontiguousarray(tensor)
    tensor = tensor.detach() if _on_cuda(tensor) else tensor.detach().cpu()
    return tensor.resolve_conj().resolve_neg().contiguous()


def _first(tensor: Any, size: int) -> Any:
    """Its first elements in C order, of at least `size` bytes if it has so many, in memory of this process."""
    count = -(-size // (tensor.element_size() if _is_torch(tensor) else tensor.itemsize))
    while len(tensor.shape) > 0 and tensor.shape[0] > 0:
        row = math.prod(tensor.shape[1:])
        rows = -(-count // max(row, 1))
        if rows > 1 or len(tensor.shape) == 1:
            tensor = tensor[:rows]
            break
        tensor = tensor[0]
    if not _is_plain(tensor):
        tensor = _plain(tensor)
    return tensor.detach().cpu() if _is_torch(tensor) else tensor


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr() if _is_torch(tensor) else tensor.ctypes.data)


def _memory(tensor: Any) -> Any:
    """Where its bytes are, and the stream in which they are worked with."""
    if not _on_cuda(tensor):
        return _Memory(_address(tensor), _HOST, 0, None)
    return _Memory(_address(tensor), _CUDA, 0, _torch().cuda.current_stream(tensor.device).cuda_stream)


def _empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
    """Memory for a tensor that is to be read: of torch, unless only numpy is there."""
    torch = _torch()
    if torch is None or _is_numpy(like):
        if "numpy" not in sys.modules:
            raise MusterError("the checkpoint has tensors, and neither torch nor numpy is imported: import it before muster.init")
        return sys.modules["numpy"].empty(shape, _NAMES[dtype])
    kind = getattr(torch, _NAMES[dtype])
    # What goes to a GPU at once goes there faster from pinned memory.
    return torch.empty(tuple(shape), dtype=kind, pin_memory=_is_torch(like) and like.device.type == "cuda")


class _Leaf(NamedTuple):
    """A tensor of the state, as it is saved."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole
    offset: Optional[tuple[int, ...]]  # None: this rank has the whole
    extent: Optional[tuple[int, ...]]
    rank: int  # who holds it
    tensor: Any

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.offset

    def described(self) -> Any:
        numbers = (_numbers(self.shape), _numbers(self.offset), _numbers(self.extent))
        return _Tensor(self.name.encode(), self.dtype.encode(), len(self.shape), self.rank, *numbers)


# ---- from a state to tensors and JSON, and back -----------------------------------------------------------------------


class _Changed(Exception):
    """A state is not laid out as it was at the last save."""


def _values(path: str, value: Any) -> Any:
    """What goes into the JSON for a value that has no tensors."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"~": "float", "v": repr(float(value))}
    if _is_tensor(value):
        raise _Changed
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (bytes, bytearray)):
        return {"~": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [_values(f"{path}.{i}", item) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"~": "tuple", "v": items}
    if isinstance(value, dict):
        tag = _tag(value)
        if tag is None:
            return {key: _values(f"{path}.{key}", item) for key, item in value.items()}
        return {"~": tag, "v": [[_values(path, key), _values(f"{path}.{key}", item)] for key, item in value.items()]}
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return _values(path, value.item())
    named = f"{type(value).__module__}.{type(value).__qualname__}"
    raise MusterError(
        f"cannot save {path}, a {named}: only tensors, numbers, text, bytes, lists, tuples and dicts can be; "
        "leave it out, or give its owner a state_dict() of these"
    )


def _tag(value: dict[Any, Any]) -> Optional[str]:
    """How a dict is called in the JSON; None: it is one there, too."""
    if isinstance(value, collections.Counter):
        return "counter"
    return None if all(type(key) is str and key != "~" for key in value) else "dict"


_json = json.JSONEncoder(separators=(",", ":")).encode
_quoted = json.encoder.encode_basestring_ascii


class _Value:
    """A part of a state without tensors, which is saved anew each time."""

    __slots__ = ("_path", "_now")
    fixed = False

    def __init__(self, path: str) -> None:
        self._path, self._now = path, None

    def look(self, value: Any) -> None:
        self._now = _values(self._path, value)

    def text(self) -> str:
        return _json(self._now)


class _Tree:
    """A dict, list or tuple with tensors in it."""

    def __init__(self, value: Any, nodes: list[Any], tag: Optional[str], path: str) -> None:
        self._type, self._nodes, self._tag = type(value), nodes, tag
        self._keys = list(value) if isinstance(value, dict) else None
        self._key_types = list(map(type, value)) if tag in ("dict", "counter") else None
        if self._keys is None:
            self._heads = [""] * len(nodes)
        elif tag is None:
            self._heads = [f"{_quoted(key)}:" for key in self._keys]
        else:
            self._heads = [f"[{_json(_values(path, key))}," for key in self._keys]
        #: Whether its text is the same at each save.
        self.fixed = all(node.fixed for node in nodes)
        self._text: Optional[str] = None

    def look(self, value: Any) -> None:
        if type(value) is not self._type:
            raise _Changed
        items = value
        if self._keys is not None:
            if list(value) != self._keys or (self._key_types is not None and list(map(type, value)) != self._key_types):
                raise _Changed
            items = value.values()
        elif len(value) != len(self._nodes):
            raise _Changed
        for node, item in zip(self._nodes, items):
            node.look(item)

    def text(self) -> str:
        if self._text is not None:
            return self._text
        tail = "]" if self._keys is not None and self._tag is not None else ""
        inner = ",".join([f"{head}{node.text()}{tail}" for head, node in zip(self._heads, self._nodes)])
        if self._keys is not None and self._tag is None:
            text = f"{{{inner}}}"
        else:
            text = f"[{inner}]" if self._tag is None else f'{{"~":"{self._tag}","v":[{inner}]}}'
        if self.fixed:
            self._text = text
        return text


class _Spot:
    """A tensor's place in a state: what it was at the last save. Looking whether it is so still costs a microsecond."""

    __slots__ = ("_outline", "_at", "_alone", "_spread", "_kind", "_dtype", "_shape", "_address", "_plain", "_simple", "_json")
    fixed = True

    def __init__(self, outline: _Outline, at: int, value: Any, alone: bool) -> None:
        shard = isinstance(value, Shard)
        tensor = value.tensor if shard else value
        self._outline, self._at, self._alone = outline, at, alone
        self._spread = (_ints(value.shape), _ints(value.offset)) if shard else None
        self._kind, self._dtype, self._shape = type(tensor), tensor.dtype, tensor.shape
        self._address, self._plain = outline.where[at]
        self._simple = self._plain and _is_torch(tensor) and outline.leaves[at].dtype != "C64"
        self._json = f'{{"~":"tensor","v":{_quoted(outline.leaves[at].name)}}}'

    def look(self, value: Any) -> None:
        tensor = value
        if self._spread is not None:
            if not isinstance(value, Shard) or (_ints(value.shape), _ints(value.offset)) != self._spread:
                raise _Changed
            tensor = value.tensor
        if type(tensor) is not self._kind or tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise _Changed
        if self._simple:
            if not tensor.is_contiguous() or tensor.is_neg():
                raise _Changed
            address = tensor.data_ptr()
        else:
            if _is_plain(tensor) is not self._plain:
                raise _Changed
            address = _address(tensor)
        if address != self._address:
            # A tensor that took its place. One that is tied to another, or was, has its name from that.
            if not self._alone or address in self._outline.addresses:
                raise _Changed
            self._outline.addresses.discard(self._address)
            self._outline.addresses.add(address)
            self._outline.moved.append(self._at)
            self._address = address
        self._outline.tensors[self._at] = tensor

    def text(self) -> str:
        return self._json


class _Outline:
    """States by name as tensors with dotted names, and JSON for everything else: no pickle. It is made once, and stays as long as
    the states have the same tensors; `look` then only takes what they hold now."""

    def __init__(self, rank: int, states: dict[str, Any], buffers: dict[str, Container[str]]) -> None:
        self.leaves: list[_Leaf] = []  # without their tensors
        self.tensors: list[Any] = []  # of the leaves; none between two saves
        self.where: list[tuple[int, bool]] = []  # of each leaf, when this was made: its address, and whether it is plain
        self.addresses: set[int] = set()
        self.moved: list[int] = []  # leaves whose memory is elsewhere than when they were placed last
        self._rank = rank
        self._names: set[str] = set()
        self._tied: dict[Any, int] = {}
        self._uses: collections.Counter[int] = collections.Counter()
        self._buffers: Container[str] = ()
        found = {}
        for name, state in states.items():
            self._buffers = buffers[name]
            found[name] = self._parts(name, state)
        # By now it is known which leaves have one name alone.
        self._nodes = {name: self._node(name, states[name], parts) for name, parts in found.items()}
        for name, state in states.items():
            self._nodes[name].look(state)
        #: Leaves whose bytes are copied before they are saved: not in C order, or of a device that is not read from.
        self.copied = [at for at, (_, plain) in enumerate(self.where) if not plain]
        #: NVIDIA's GPUs that have some.
        self.devices = {tensor.device for tensor in self.tensors if _on_cuda(tensor)}

    def look(self, states: dict[str, Any]) -> bool:
        """Whether it is still right for these states; it has their tensors then."""
        self.tensors = [None] * len(self.leaves)
        try:
            for name, state in states.items():
                self._nodes[name].look(state)
        except (_Changed, KeyError, AttributeError, RuntimeError):
            return False
        return len(states) == len(self._nodes)

    def text(self) -> str:
        """The JSON of what the states held then."""
        return "{" + ",".join(f"{_json(name)}:{node.text()}" for name, node in self._nodes.items()) + "}"

    def let_go(self) -> None:
        """The states' tensors may be freed again."""
        self.tensors = []

    def _parts(self, path: str, value: Any) -> Any:
        """The leaf of a tensor; of what has tensors in it, these of all its items; None for everything else."""
        if _is_tensor(value):
            return self._leaf(path, value)
        if isinstance(value, dict):
            parts = [self._parts(f"{path}.{key}", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [self._parts(f"{path}.{i}", item) for i, item in enumerate(value)]
        else:
            return None
        return parts if any(part is not None for part in parts) else None

    def _node(self, path: str, value: Any, parts: Any) -> Any:
        if parts is None:
            return _Value(path)
        if isinstance(parts, int):
            return _Spot(self, parts, value, self._uses[parts] == 1)
        if isinstance(value, dict):
            nodes = [self._node(f"{path}.{key}", item, part) for (key, item), part in zip(value.items(), parts)]
            return _Tree(value, nodes, _tag(value), path)
        nodes = [self._node(f"{path}.{i}", item, part) for i, (item, part) in enumerate(zip(value, parts))]
        return _Tree(value, nodes, None if isinstance(value, list) else "tuple", path)

    def _leaf(self, path: str, value: Any) -> int:
        tensor, shape, offset = value if isinstance(value, Shard) else (value, value.shape, None)
        if _is_spread(tensor):
            raise MusterError(f"cannot save {path}, a DTensor: hand over muster.Shard(tensor.to_local(), tensor.shape, offset) in its place")
        dtype = _dtype(tensor)
        if dtype is None:
            raise MusterError(f"cannot save {path}, a tensor of {tensor.dtype}: safetensors holds dense tensors of {', '.join(_DTYPES)}")
        extent = _ints(tensor.shape)
        address, plain = _address(tensor), _is_plain(tensor)
        key = (address, dtype, extent) if offset is None and 0 not in extent and plain else path
        if key in self._tied:
            at = self._tied[key]
            self._uses[at] += 1
            return at
        if path in self._names:
            raise MusterError(f"two tensors of the state are called {path}: rename one (a key has a dot in it, or 1 and '1' are both keys)")
        self._names.add(path)
        if offset is None:
            leaf = _Leaf(path, dtype, _ints(shape), None, None, 0 if path in self._buffers else _ALL_RANKS, None)
        else:
            leaf = _Leaf(path, dtype, _ints(shape), _ints(offset), extent, self._rank, None)
        at = len(self.leaves)
        self._tied[key] = at
        self._uses[at] = 1
        self.addresses.add(address)
        self.where.append((address, plain))
        self.leaves.append(leaf)
        self.tensors.append(tensor)
        return at


class _Checkpoint:
    """What the generation begins with, open for reading."""

    def __init__(self, handle: Any, origin: Any) -> None:
        self._handle, self.step, self.world = handle, int(origin.step), int(origin.world)
        self._saved: dict[str, tuple[str, tuple[int, ...]]] = {}
        tensor = _Tensor()
        for i in range(origin.tensors):
            _library()("muster_restore_tensor", handle, i, ctypes.byref(tensor))
            self._saved[tensor.name.decode()] = (tensor.dtype.decode(), tuple(tensor.shape[: tensor.dims]))
        self._wants: dict[str, _Leaf] = {}
        self._used: set[int] = set()

    def close(self) -> None:
        _library()("muster_restore_close", self._handle)

    def blob(self, name: str) -> Optional[bytes]:
        data, length = _ptr(), _size()
        code = _library()("muster_restore_blob", self._handle, name.encode(), ctypes.byref(data), ctypes.byref(length))
        return None if code == NOTHING else ctypes.string_at(data, length.value)

    def value(self, saved: Any, live: Any) -> Any:
        """The value that this JSON stands for; its tensors are filled by `load`, in place where `live` has room for them."""
        if isinstance(saved, list):
            return [self.value(item, _at(live, i)) for i, item in enumerate(saved)]
        if not isinstance(saved, dict):
            return saved
        tag = saved.get("~")
        inner: Any = saved.get("v")
        if tag is None:
            return {key: self.value(item, _at(live, key)) for key, item in saved.items()}
        if tag == "tensor":
            return self._want(inner, live)
        if tag == "tuple":
            return tuple(self.value(item, _at(live, i)) for i, item in enumerate(inner))
        if tag in ("dict", "counter"):
            pairs = [(self.value(key, None), item) for key, item in inner]
            found = {key: self.value(item, _at(live, key)) for key, item in pairs}
            return collections.Counter(found) if tag == "counter" else found
        if tag == "float":
            return float(inner)
        if tag == "bytes":
            return base64.b64decode(inner)
        raise MusterError(
            f"the checkpoint has a value of an unknown kind, {tag!r}: use the muster.py that saved it, or a newer one", RESTORE
        )

    def _want(self, name: str, live: Any) -> Any:
        if name in self._wants:
            return self._wants[name].tensor
        if name not in self._saved:
            raise MusterError(f"the checkpoint has no tensor {name}, of which it speaks: it is damaged", DAMAGED)
        dtype, whole = self._saved[name]
        part = live if isinstance(live, Shard) else None
        like = part.tensor if part else live
        shape, offset = (whole, None) if part is None else (_ints(like.shape), _ints(part.offset))
        tensor = None
        if _is_torch(like) or _is_numpy(like):
            fits = _dtype(like) == dtype and _ints(like.shape) == shape and _is_plain(like) and (_is_torch(like) or like.flags.writeable)
            if fits and (0 in shape or _address(like) not in self._used):
                tensor = like
        if tensor is None:
            tensor = _empty(shape, dtype, like)
        self._used.add(_address(tensor))
        self._wants[name] = _Leaf(name, dtype, whole, offset, shape if part else None, _ALL_RANKS, tensor)
        return tensor

    def load(self) -> None:
        """Reads and verifies all that was asked for."""
        wants = list(self._wants.values())
        tensors = (_Tensor * len(wants))(*[leaf.described() for leaf in wants])
        into = (_Memory * len(wants))(*[_memory(leaf.tensor) for leaf in wants])
        _library()("muster_restore_load", self._handle, tensors, into, len(wants))


def _at(live: Any, key: Any) -> Any:
    """What a state has there now, if anything."""
    try:
        return live[key] if isinstance(live, (dict, list, tuple)) and not isinstance(live, Shard) else None
    except (KeyError, IndexError, TypeError):  # a list has no names
        return None


def _put(live: Any, value: Any) -> Any:
    """Puts a value where another was: dicts, lists and tensors stay the same objects."""
    if isinstance(live, dict) and isinstance(value, dict):
        for key, item in value.items():
            live[key] = _put(live.get(key), item)
        return live
    if isinstance(live, list) and isinstance(value, list):
        live[:] = [_put(_at(live, i), item) for i, item in enumerate(value)]
        return live
    here = live.tensor if isinstance(live, Shard) else live
    if _is_tensor(here) and _is_tensor(value) and _ints(here.shape) == _ints(value.shape):
        if _is_torch(here) and here.data_ptr() != value.data_ptr():
            with _torch().no_grad():
                here.copy_(value)
        elif _is_numpy(here) and here is not value:
            here[...] = value
        return live
    return value


def _reshaped(path: str, live: Any, value: Any) -> Iterator[str]:
    """Tensors that `_put` takes out of a state, as the saved ones have another shape. Empty ones only kept a place for them."""
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _reshaped(f"{path}.{key}", _at(live, key), item)
    elif _is_tensor(value) and _is_tensor(live) and not isinstance(live, Shard):
        saved, now = _ints(value.shape), _ints(live.shape)
        if saved != now and 0 not in now:
            yield f"{path} was of shape {saved} and is of shape {now} now"


# ---- what a script hands over -----------------------------------------------------------------------------------------


def _modules(owner: Any) -> Iterator[Any]:
    """A model and all that it is made of."""
    torch = _torch()
    return owner.modules() if torch is not None and isinstance(owner, torch.nn.Module) else iter(())


class _Tracked:
    """One of the things whose state is saved."""

    def __init__(self, name: str, owner: Any) -> None:
        # The model within: it is the same by another wrapper, and in another world.
        while type(owner).__name__ in ("DistributedDataParallel", "DataParallel") and hasattr(owner, "module"):
            owner = owner.module
        owner = getattr(owner, "_orig_mod", owner)  # torch.compile
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in _modules(owner)):
            raise MusterError(
                f"cannot track {name}, FullyShardedDataParallel (FSDP1): its state differs from rank to rank under one name, and would be "
                "restored wrong; wrap the model with torch.distributed.fsdp.fully_shard (FSDP2) and hand over muster.Shard of its "
                "tensors, or save it with torch.distributed.checkpoint and leave it and its optimizer out"
            )
        has_state = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
        if not (has_state or isinstance(owner, (dict, list))):
            kind = type(owner).__qualname__
            raise MusterError(
                f"cannot track {name}, a {kind}: hand over what has state_dict() and load_state_dict(), "
                "or a dict or list that stays the same object"
            )
        self.name, self.owner, self._has_state = name, owner, has_state

    def state(self) -> Any:
        return self.owner.state_dict() if self._has_state else self.owner

    def refuse_spread(self) -> None:
        """Refuses parameters of which each rank has a part: `state_dict` does not say which."""
        groups = self.owner.param_groups if _is_optimizer(self.owner) else []
        parameters = [*self.tensors(), *((f"group {n}", p) for n, group in enumerate(groups) for p in group["params"])]
        spread = [path for path, tensor in parameters if _is_spread(tensor)]
        if spread:
            raise MusterError(
                f"cannot track {self.name}, of which {len(spread)} of {len(parameters)} parameters are DTensors (fully_shard, FSDP2; the first: "
                f"{spread[0]}): hand over a dict with muster.Shard(tensor.to_local(), tensor.shape, offset) of each tensor in its place, or "
                "save it with torch.distributed.checkpoint and leave it out"
            )

    def is_model(self) -> bool:
        torch = _torch()
        return torch is not None and isinstance(self.owner, torch.nn.Module)

    def tensors(self) -> list[tuple[str, Any]]:
        if not self.is_model():
            return []
        return [*self.owner.named_parameters(), *self.owner.named_buffers()]

    def buffers(self) -> set[str]:
        """Buffers of a model differ from rank to rank, and DDP gives all ranks those of rank 0."""
        if not self.is_model():
            return set()
        return {f"{self.name}.{name}" for name, _ in self.owner.named_buffers()}

    def adopt(self, live: Any, value: Any) -> None:
        if not self._has_state:
            _put(self.owner, value)
            return
        own = {_address(tensor) for _, tensor in self.tensors()}
        same = isinstance(live, dict) and isinstance(value, dict) and live.keys() == value.keys() and bool(own)
        if same and all(_is_torch(t) and _is_torch(live[k]) and t.data_ptr() == live[k].data_ptr() in own for k, t in value.items()):
            return  # a model, filled in place
        try:
            self.owner.load_state_dict(value)
        except Exception as error:
            if "OutOfMemory" in type(error).__name__:
                raise
            raise MusterError(
                f"the checkpoint's {self.name} does not fit what the script has now ({type(error).__name__}: {error}). Nothing of the "
                "checkpoint is lost: go on with the script that saved it, or begin anew with another --rdzv-id or --store",
                MISMATCH,
            ) from error

    def converted(self, live: Any, value: Any) -> list[str]:
        """Tensors of a model that had another type when they were saved: torch converts them without a word."""
        if not self.is_model() or not isinstance(live, dict) or not isinstance(value, dict):
            return []
        pairs = [(key, tensor, live.get(key)) for key, tensor in value.items()]
        found = [(key, saved, now) for key, saved, now in pairs if _is_torch(saved) and _is_torch(now) and saved.dtype != now.dtype]
        return [f"{self.name}.{key} was {saved.dtype} and is {now.dtype}" for key, saved, now in found]

    def reshaped(self, value: Any) -> list[str]:
        """Tensors of a dict or list that had another shape when they were saved. What has a `load_state_dict` sees to that itself."""
        return [] if self._has_state else list(_reshaped(self.name, self.owner, value))


def _is_optimizer(owner: Any) -> bool:
    groups = getattr(owner, "param_groups", None)
    return isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)


def _storages(value: Any) -> Iterator[Any]:
    """The memory that a state's tensors of torch lie in."""
    if isinstance(value, Shard):
        value = value.tensor
    if _is_torch(value):
        value = value.to_local() if _is_spread(value) else value
        if value.layout is _torch().strided:
            yield value.untyped_storage().data_ptr()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _storages(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)


def _same_parameters(all_tracked: list[_Tracked]) -> None:
    """Refuses an optimizer of parameters that are no model's here: it would train something that is neither saved nor restored."""
    optimizers = [tracked for tracked in all_tracked if _is_optimizer(tracked.owner)]
    if not optimizers or not any(tracked.is_model() for tracked in all_tracked):
        return
    known: set[Any] = set()
    for tracked in all_tracked:
        known.update(_storages(tracked.state()))
        # Frozen ones, and those that a state_dict of the model's own leaves out, are the model's all the same.
        known.update(_storages([tensor.detach() for _, tensor in tracked.tensors()]))
    for tracked in optimizers:
        of_groups = [(n, parameter) for n, group in enumerate(tracked.owner.param_groups) for parameter in group["params"]]
        foreign = [(n, parameter) for n, parameter in of_groups if known.isdisjoint(_storages(parameter.detach()))]
        if foreign:
            n, first = foreign[0]
            raise MusterError(
                f"{tracked.name} has {len(foreign)} of {len(of_groups)} parameters that no model here has, the first of shape "
                f"{_ints(first.shape)} in its group {n}: they would be trained, and neither saved nor restored; make the optimizer of the "
                "parameters of the model that is handed over, as it is now, or hand over in one call all models that it trains",
                MISMATCH,
            )


def _same_kind(tracked: _Tracked) -> None:
    """Refuses the state of another kind of optimizer, which torch takes without a word."""
    defaults = getattr(tracked.owner, "defaults", None)
    if not _is_optimizer(tracked.owner) or not isinstance(defaults, dict):
        return
    for n, group in enumerate(tracked.owner.param_groups):
        missing = [name for name in defaults if name not in group]
        if missing:
            raise MusterError(
                f"the checkpoint's {tracked.name} was another kind of optimizer: its group {n} has no {', '.join(missing)}, which "
                f"{type(tracked.owner).__name__} needs; go on with the kind that saved it, or give it another name to begin it anew",
                MISMATCH,
            )


# ---- the job ----------------------------------------------------------------------------------------------------------


def init(*, save_every: Optional[int] = None, rng: bool = True, **state: Any) -> Job:
    """Attaches to the job, and puts back what it saved last into `state`: models, optimizers, schedulers, scalers,
    samplers, whatever has `state_dict()` and `load_state_dict()`, and dicts or lists of tensors and plain values. The
    names are those in the checkpoint.

    `save_every`: a save before every so many steps, besides those that are asked for. `rng`: torch's random
    generators are saved and put back, too, each rank's own.

    Call it once, when all of these are made and on their devices, before the loop. Not under `muster run` it does nothing.
    """
    job = Job(save_every=save_every, rng=rng)
    if state:
        job.restore(**state)
    return job


class Job:
    """This process's part in the job."""

    def __init__(self, *, save_every: Optional[int] = None, rng: bool = True) -> None:
        if save_every is not None and save_every < 1:
            raise ValueError(f"save_every is {save_every}: it is a number of steps, or None")
        self._every, self._rng = save_every, rng
        self._tracked: list[_Tracked] = []
        self._samplers: list[ElasticSampler] = []
        self._handle: Any = None
        self._outline: Optional[_Outline] = None
        self._declared: Optional[list[_Leaf]] = None
        self._entries: dict[Any, int] = {}  # where in what all ranks declared a leaf of this one is, by its key
        self._wants: Any = ()  # of each of these: what is wanted of it
        self._looks: list[int] = []  # the leaves of which the first bytes are compared
        self._data: Any = None  # of each of these: where the tensor is
        self._streams: dict[Any, int] = {}  # by which this was placed
        self._wanted = False
        self._no_store: Optional[str] = None  # why nothing is saved
        self._random: Optional[bytes] = None
        self._restored: tuple[int, list[str]] = (0, [])  # the checkpoint's step and names, until the first step after it
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # figures of the state before a step
        #: The step to begin with: 0, or where the checkpoint that was restored begins.
        self.start = 0
        self._step, self._begun, self._steps, self._over = 0, False, 0, False
        place = _Place(0, 1, 0, 1, 0, 0)
        if os.environ.get("MUSTER_CONTROL_FD"):
            handle = _ptr()
            _library()("muster_open", ABI, ctypes.byref(handle), ctypes.byref(place))
            self._handle = handle
        else:
            place.rank, place.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.rank, self.world = int(place.rank), int(place.world)
        #: Counts the changes of the job's nodes and its restarts.
        self.generation = int(place.generation)

    @property
    def attached(self) -> bool:
        """Whether this process was started by `muster run`, and its training is not over."""
        return self._handle is not None

    def restore(self, **state: Any) -> int:
        """Tracks this state (see `init`), and puts back what was saved of it. Returns the step to begin with."""
        more = [_Tracked(name, owner) for name, owner in state.items()]
        _same_parameters(self._tracked + more)
        self._tracked += more
        self._samplers += [tracked.owner for tracked in more if isinstance(tracked.owner, ElasticSampler)]
        if not self.attached:
            return self.start
        for tracked in more:
            tracked.refuse_spread()
        handle, origin = _ptr(), _Origin()
        if _library()("muster_restore_open", ctypes.byref(handle), ctypes.byref(origin)) == NOTHING:
            return self.start
        checkpoint = _Checkpoint(handle, origin)
        try:
            self._adopt(checkpoint, more)
        finally:
            checkpoint.close()
        return self.start

    def _adopt(self, checkpoint: _Checkpoint, more: list[_Tracked]) -> None:
        text = checkpoint.blob("python")
        if text is None:
            raise MusterError("the checkpoint was not saved by muster.py: give this job a --rdzv-id, or a --store, of its own", MISMATCH)
        saved = json.loads(text)
        if saved.get("format") != 1:
            raise MusterError(
                f"the checkpoint has format {saved.get('format')} of muster.py, this one knows 1: use the one that saved it", MISMATCH
            )
        missing = [tracked.name for tracked in more if tracked.name not in saved["state"]]
        if missing:
            have = ", ".join(saved["state"])
            raise MusterError(
                f"the checkpoint of step {checkpoint.step} has no {', '.join(missing)}, only {have}: were names changed since?", MISMATCH
            )
        found = [(tracked, tracked.state()) for tracked in more]
        values = [checkpoint.value(saved["state"][tracked.name], live) for tracked, live in found]
        checkpoint.load()
        for (tracked, live), value in zip(found, values):
            for what, changed, means in (
                ("type", tracked.converted(live, value), "They are converted, and the next save has the new type"),
                (
                    "shape",
                    tracked.reshaped(value),
                    "The saved one takes its place, and the one that the script made is no part of the state any more: take the tensor "
                    "from the state after the restore, or make it of the saved shape",
                ),
            ):
                if changed:
                    self._say(
                        f"the checkpoint of step {checkpoint.step} has tensors of another {what} than the script ({len(changed)}, the "
                        f"first: {changed[0]}). {means}"
                    )
            tracked.adopt(live, value)
            _same_kind(tracked)
        self._restored = checkpoint.step, list(saved["state"])
        self._random = checkpoint.blob(f"rng/{self.rank}") if self._rng else None
        self.start = self._step = checkpoint.step

    # ---- the loop ----

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left of `total`, those of all epochs, each before it begins. Saves and exits by itself where the
        job has to stop; after the last one it saves once more and detaches. Raises `MusterError` after that."""
        if self._over:
            raise MusterError(
                f"job.steps({total}) comes after the last step of the job, and would run nothing: call it once, with the steps of all "
                "epochs together, and take the epoch from the step (step // steps_per_epoch)"
            )
        while True:
            step = self._next()
            if step >= total:
                break
            self._boundary(step)
            yield step
        self.finish()

    def step(self) -> int:
        """For a loop of one's own: call it before each step. The one before is complete; returns the number of this one."""
        step = self._next()
        self._boundary(step)
        return step

    def finish(self) -> None:
        """The end of such a loop: the last step is complete. Saves what is new, and detaches; raises `MusterError` if it is not saved."""
        try:
            if self._next() > self.start:
                self._save()
        finally:
            self._over = True
            self.close()

    def _next(self) -> int:
        if self._begun:
            self._begun = False
            self._step += 1
            self._steps += 1
            for sampler in self._samplers:
                sampler.advance()
        return self._step

    def _boundary(self, step: int) -> None:
        if self.attached:
            self._tell_what_is_left_out()
            self._ask(step)
            if self._random is not None:
                _set_random(self._random)
                self._random = None
        self._begun = True

    def _tell_what_is_left_out(self) -> None:
        """Names of the checkpoint that nobody handed over. Only now is that known: `restore` may come several times."""
        (of, names), self._restored = self._restored, (0, [])
        tracked = {tracked.name for tracked in self._tracked}
        left = [name for name in names if name not in tracked]
        if left:
            self._say(
                f"the checkpoint of step {of} has state that the script has not handed over: {', '.join(left)}. No save from here on has "
                "it, and it is lost once that checkpoint is retired. Hand it over to muster.init or job.restore by name, before the "
                "first step; if it is to go, do nothing"
            )

    def _say(self, text: str) -> None:
        """Rank 0 says what goes for all ranks."""
        if self.rank == 0:
            print(f"muster: {text}", file=sys.stderr, flush=True)

    def _ask(self, step: int) -> None:
        directive = _Directive()
        try:
            _library()("muster_step", self._handle, step, ctypes.byref(directive))
        except MusterError as error:
            if error.code == UNDECIDED:
                self._save_or_say(step)
            raise
        if directive.action == _STOP:
            self._stop(step, _REASONS[directive.reason] if directive.reason < len(_REASONS) else "unknown")
        elif directive.action == _CHECKPOINT:
            why = self._save_or_say(step)
            if why is None:
                _library()("muster_done", self._handle, step, _CHECKPOINT)
            else:
                _library()("muster_failed", self._handle, step, why.encode())
        elif self._wanted or (self._every is not None and step > self.start and step % self._every == 0):
            self._save_or_say(step)
        elif self._steps == 1 and self._tracked:
            # By now optimizers have all their state. Finding memory for it now takes nothing from a later deadline.
            self._prepare()

    def _stop(self, step: int, why: str) -> None:
        self._save()
        _library()("muster_done", self._handle, step, _STOP)
        self._say(f"all ranks stop before step {step} ({why})")
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            dist.barrier()  # nobody leaves while another still talks to it
        raise SystemExit(0)

    # ---- saving ----

    def save(self) -> None:
        """Has the state saved when this step is complete, before the next one begins. All ranks ask for it in the same step."""
        self._wanted = True

    def _save(self) -> Optional[str]:
        """Copies this rank's part of the state into a slot; it becomes durable, and is committed, while the training goes on.
        Why nothing is saved, where the job has no store."""
        self._wanted = False
        if not self.attached or not self._tracked:
            return None
        outline = self._collect()
        try:
            if not self._declare(outline.leaves):
                return self._no_store
            blobs = [] if not self._rng or _torch() is None else [(f"rng/{self.rank}", _random())]
            if self.rank == 0:
                blobs.append(("python", f'{{"format":1,"state":{outline.text()}}}'.encode()))
                of, figures = self._evaluated
                finite = {name: value for name, value in figures.items() if math.isfinite(value)}
                if of == self._step and finite:
                    blobs.append(("metrics", _json(finite).encode()))
            self._look(outline)
            data, _keep = self._placed(outline)
            c_blobs = (_Blob * len(blobs))(*[_Blob(name.encode(), blob, len(blob)) for name, blob in blobs])
            _library()("muster_save", self._handle, self._step, data, len(data), c_blobs, len(blobs), _WAIT, None)
        finally:
            outline.let_go()
        return None

    def _save_or_say(self, step: int) -> Optional[str]:
        """A save without which the training goes on; why there is none."""
        try:
            return self._save()
        except MusterError as error:
            if error.code not in (BUSY, SAVE):
                raise
            print(f"muster: rank {self.rank} could not save step {step}: {error}", file=sys.stderr, flush=True)
            return str(error)

    def _collect(self) -> _Outline:
        """What the state holds now."""
        states = {tracked.name: tracked.state() for tracked in self._tracked}
        if self._outline is None or not self._outline.look(states):
            buffers = {tracked.name: tracked.buffers() for tracked in self._tracked}
            self._outline, self._data = _Outline(self.rank, states, buffers), None
        return self._outline

    def _declare(self, leaves: list[_Leaf]) -> bool:
        """Says what all ranks hold, if that has changed since. False: there is no store."""
        if self._no_store is not None:
            return False
        if leaves is self._declared or leaves == self._declared:
            self._declared = leaves
            return True
        everywhere = leaves
        if any(leaf.offset is not None for leaf in leaves) and self.world > 1:
            everywhere = _gathered(leaves, self.world)
        tensors = (_Tensor * len(everywhere))(*[leaf.described() for leaf in everywhere])
        wants = (_u8 * len(everywhere))()
        try:
            _library()("muster_declare", self._handle, tensors, len(everywhere), wants)
        except MusterError as error:
            if error.code != NO_STORE:
                raise
            self._no_store = str(error)
            self._say(f"nothing will be saved: {error}")
            return False
        mine = (_ALL_RANKS, self.rank)
        self._entries = {leaf.key: i for i, leaf in enumerate(everywhere) if leaf.rank in mine}
        self._looks = [at for at, leaf in enumerate(leaves) if leaf.key in self._entries and wants[self._entries[leaf.key]] & _LOOKS]
        self._declared, self._wants, self._data = leaves, wants, None
        return True

    def _prepare(self) -> None:
        """Has done what the first save would wait for: memory is found and, for tensors on GPUs, registered with their driver."""
        outline = self._collect()
        try:
            if self._declare(outline.leaves) and outline.devices:
                data, _keep = self._placed(outline)
                _library()("muster_prepare", self._handle, data, len(data))
        finally:
            outline.let_go()

    def _placed(self, outline: _Outline) -> tuple[Any, list[Any]]:
        """Where the tensors are that this rank writes, of all that were declared; and what has to live as long."""
        streams = {device: _torch().cuda.current_stream(device).cuda_stream for device in outline.devices}
        if self._data is None or streams != self._streams:
            self._data, self._streams = (_Memory * len(self._wants))(), streams
            again: Sequence[int] = range(len(outline.leaves))
        else:
            again = [*outline.moved, *outline.copied]
        keep, outline.moved = [], []
        for at in again:
            i = self._entries.get(outline.leaves[at].key)
            if i is None or not self._wants[i] & _WRITES:
                continue
            tensor = outline.tensors[at]
            if not _is_plain(tensor):
                tensor = _plain(tensor)
                keep.append(tensor)
            stream = streams[tensor.device] if _on_cuda(tensor) else None
            self._data[i] = _Memory(_address(tensor), _HOST if stream is None else _CUDA, 0, stream)
        return self._data, keep

    def _look(self, outline: _Outline) -> None:
        """Has the first bytes compared of some tensors that all ranks are to have alike."""
        first, keep = (_ptr * len(self._wants))(), []
        for at in self._looks:
            tensor = outline.tensors[at]
            if _on_cuda(tensor) or not _is_plain(tensor):
                tensor = _first(tensor, _LOOK)
                keep.append(tensor)
            first[self._entries[outline.leaves[at].key]] = _address(tensor)
        _library()("muster_look", self._handle, first, len(first))

    # ---- telling ----

    def report(self, **metrics: float) -> None:
        """How this rank trains, for the agent's /metrics: any of training_loss (or loss), samples_per_second (of this rank), learning_rate
        (or lr), loss_scale, data_seconds, compute_seconds, communication_seconds, gradient_sync_seconds. Costs no system call."""
        values = dict.fromkeys(_METRICS, math.nan)
        for name, value in metrics.items():
            name = {"loss": "training_loss", "lr": "learning_rate"}.get(name, name)
            if name not in values:
                raise TypeError(f"{name} is no metric: there are {', '.join(_METRICS)}")
            values[name] = float(value)
        if self.attached:
            _library()("muster_report", self._handle, ctypes.byref(_Metrics(steps=self._steps, **values)))

    def evaluated(self, **figures: float) -> None:
        """How good the model is as it is now, by names of your own such as loss or accuracy, over all ranks. Call it behind the
        optimizer's step. Rank 0's are saved with this very state, if it is saved (`save`), and with no other; `muster run --keep-best`
        goes by them."""
        of = self._step + int(self._begun)
        if self._evaluated[0] != of:
            self._evaluated = (of, {})
        self._evaluated[1].update({name: float(value) for name, value in figures.items()})

    def alive(self) -> None:
        """A sign of life of something long between two steps, as an evaluation is; now and then, on all ranks alike."""
        if self.attached:
            _library()("muster_report", self._handle, None)

    def close(self) -> None:
        """Detaches: from now on a stop is a signal. What is saved stays."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _library()("muster_close", handle)


def _gathered(leaves: list[_Leaf], world: int) -> list[_Leaf]:
    """What all ranks hold: the same list on every rank, without tensors."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        raise MusterError(
            "the state has shards, and the ranks cannot tell each other of which: call torch.distributed.init_process_group first"
        )
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, [leaf._replace(tensor=None) for leaf in leaves if leaf.offset is not None])
    return [leaf for leaf in leaves if leaf.offset is None] + [part for of_rank in parts for part in of_rank]


def _random() -> bytes:
    torch = _torch()
    states = [torch.get_rng_state().numpy().tobytes()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return json.dumps([base64.b64encode(state).decode() for state in states]).encode()


def _set_random(blob: bytes) -> None:
    torch = _torch()
    if torch is None:
        return
    states = [torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8) for state in json.loads(blob)]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


# ---- the elastic sampler ----------------------------------------------------------------------------------------------


class ElasticSampler:
    """Batches of indices for a DataLoader's `batch_sampler`: this rank's part of each batch.

        sampler = muster.ElasticSampler(len(dataset), batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler)
        job = muster.init(model=model, optimizer=optimizer, sampler=sampler)

    In an epoch each sample comes once, in an order that the seed alone decides, whatever the world does meanwhile.
    `batch_size` is over all ranks, so a step is the same step in every world; with `per_rank` it is each rank's. Parts
    of a batch differ by one sample at most. Samples count as done when `Job.steps` or `Job.step` goes on behind them,
    not when a loader reads ahead.
    """

    def __init__(
        self,
        samples: Any,  # how many, or what has so many
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = True,
        per_rank: bool = False,
        rank: Optional[int] = None,
        world: Optional[int] = None,
    ) -> None:
        self.samples = samples if isinstance(samples, int) else len(samples)
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
        self.batch_size = batch_size * self.world if per_rank else batch_size
        self.drop_last = drop_last
        if self.batch_size < self.world:
            raise ValueError(
                f"a batch of {batch_size} for {self.world} ranks leaves some without a sample: take a larger batch, or per_rank=True"
            )
        self._config = _SamplerConfig(self.samples, seed, batch_size, 0, int(per_rank), int(drop_last))
        self._done = _Cursor(self._config, None)
        self._from: Optional[bytes] = None  # where the next iteration begins, if not behind what is done
        self._read = 0  # batches that were handed out and are not done
        self._moved = False

    @property
    def epoch(self) -> int:
        """The epoch of the next batch to be done, from 0."""
        return self._done.place()[1]

    def __iter__(self) -> Iterator[list[int]]:
        cursor = _Cursor(self._config, self._from or self._done.place()[0])
        self._from, epoch = None, None
        while True:
            before = cursor.place()[0]
            of, indices = cursor.next(self.rank, self.world, self.batch_size)
            epoch = of if epoch is None else epoch
            if of != epoch:
                self._from = before
                return
            if not indices:
                raise RuntimeError(
                    f"the last batch of epoch {of} has less than a sample for each of {self.world} ranks: use drop_last=True"
                )
            self._read += 1
            yield indices

    def __len__(self) -> int:
        """Batches that an iteration has from here to the end of its epoch."""
        cursor = _Cursor(self._config, self._from or self._done.place()[0])
        left = self.samples - cursor.place()[2]
        batch = min(self.batch_size, self.samples)
        if self.drop_last and left < batch:
            left = self.samples
        return left // batch if self.drop_last else -(-left // batch)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch, unless that is where the next iteration begins anyway: after a restore in the
        middle of an epoch, `set_epoch` of that one changes nothing."""
        cursor = _Cursor(self._config, self._from or self._done.place()[0])
        of, _ = cursor.next(self.rank, self.world, self.batch_size)
        if of != epoch:
            self._config.epoch = epoch
            self._done, self._from = _Cursor(self._config, None), None
            self._moved, self._read = self._read > 0, 0

    def advance(self) -> None:
        """A batch is done. `Job` calls this for the samplers that it tracks."""
        if not self._moved:
            self._done.next(self.rank, self.world, self.batch_size)
            self._read = max(0, self._read - 1)
        self._moved = False

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._done.place()[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done, self._from, self._read, self._moved = _Cursor(self._config, state["state"]), None, 0, False


class _Cursor:
    """The runtime's cursor over shuffled epochs."""

    def __init__(self, config: Any, state: Optional[bytes]) -> None:
        self._handle = _ptr()
        if state is not None and len(state) != 40:
            raise MusterError(f"{len(state)} bytes are no state of a sampler: it has 40")
        _library()("muster_sampler_open", ctypes.byref(self._handle), ctypes.byref(config), state)

    def next(self, rank: int, world: int, room: int) -> tuple[int, list[int]]:
        """The epoch of the next batch, and this rank's part of it."""
        into, batch = (_u64 * room)(), _Batch()
        _library()("muster_sampler_next", self._handle, rank, world, into, room, ctypes.byref(batch))
        return int(batch.epoch), list(into[: batch.count])

    def place(self) -> tuple[bytes, int, int]:
        """The state, the epoch, and how many of its samples are behind."""
        state, epoch, position = ctypes.create_string_buffer(40), _u64(), _u64()
        _library()("muster_sampler_state", self._handle, state, ctypes.byref(epoch), ctypes.byref(position))
        return state.raw, int(epoch.value), int(position.value)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and _loaded is not None:
            _loaded("muster_sampler_close", self._handle)
