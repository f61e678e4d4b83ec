"""Tensors as bytes, in the layout of ``safetensors``. Works with torch, and with numpy alone."""

from __future__ import annotations

import json
import math
import struct
import sys
from typing import Any, Literal, NamedTuple

from insitu.block import ArgumentError
from insitu.net.errors import WireError
from insitu.net.frames import Buffer, decode_json
from insitu.net.limits import WireLimits

__all__ = ["Library", "TensorReader", "TensorWriter", "is_array", "is_tensor"]

Library = Literal["torch", "numpy"]


class _Dtype(NamedTuple):
    name: str
    size: int


_DTYPES = {
    "BOOL": _Dtype("bool", 1),
    "U8": _Dtype("uint8", 1),
    "I8": _Dtype("int8", 1),
    "U16": _Dtype("uint16", 2),
    "I16": _Dtype("int16", 2),
    "U32": _Dtype("uint32", 4),
    "I32": _Dtype("int32", 4),
    "U64": _Dtype("uint64", 8),
    "I64": _Dtype("int64", 8),
    "F8_E4M3": _Dtype("float8_e4m3fn", 1),
    "F8_E5M2": _Dtype("float8_e5m2", 1),
    "F16": _Dtype("float16", 2),
    "BF16": _Dtype("bfloat16", 2),
    "F32": _Dtype("float32", 4),
    "F64": _Dtype("float64", 8),
}
_CODES = {dtype.name: code for code, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 48


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor. Does not load torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Whether it is a numpy array. Does not load numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class TensorWriter:
    """Collects tensors and arrays; the same one twice is one."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._parts: list[tuple[str, list[int], memoryview]] = []

    def add(self, value: Any, what: str = "a value") -> int:
        """Its number. Raises ``ArgumentError``, which speaks of ``what``, for a dtype or layout that can't travel."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._parts)
            self._kept.append(value)
            self._parts.append(_torch_part(value, what) if is_tensor(value) else _numpy_part(value, what))
        return number

    def data(self) -> bytes:
        """All of them, as a file of ``safetensors`` has them; nothing if there are none."""
        return b"".join(self.pieces())

    def pieces(self) -> tuple[bytes | memoryview, ...]:
        """The same, uncopied: what was added must stay as it is until they are sent."""
        if not self._parts:
            return ()
        header: dict[str, Any] = {}
        at = 0
        for number, (code, shape, raw) in enumerate(self._parts):
            header[str(number)] = {"dtype": code, "shape": shape, "data_offsets": [at, at + raw.nbytes]}
            at += raw.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return _LENGTH.pack(len(text)) + text, *(raw for _, _, raw in self._parts)


class TensorReader:
    """The tensors of a message. All is checked first; each is made when it is asked for.

    ``library``: what they are made with; torch where it is installed, if left out. With numpy alone, the
    bfloat16 and float8 that it lacks become float32, which holds each of their values exactly.
    """

    def __init__(self, data: Buffer, limits: WireLimits | None = None, library: Library | None = None) -> None:
        limits = limits or WireLimits()
        if len(data) > limits.tensors:
            raise WireError(f"{len(data)} bytes of tensors are more than the {limits.tensors} taken", "too-large")
        self._library: Library | None = library
        self._entries: dict[int, tuple[str, tuple[int, ...], memoryview]] = {}
        self._made: dict[tuple[int, Library], Any] = {}
        self._large = max(len(data) // 2, 1)
        if not data:
            return
        view = memoryview(data)
        if len(view) < _LENGTH.size:
            raise WireError("the part of tensors is cut off")
        (length,) = _LENGTH.unpack(view[: _LENGTH.size])
        start = _LENGTH.size + length
        if start > len(view):
            raise WireError("the part of tensors is shorter than its header")
        header = decode_json(view[_LENGTH.size : start], limits)
        if len(header) > limits.count:
            raise WireError(f"{len(header)} tensors are more than the {limits.count} that are taken", "too-large")
        self._read(header, view[start:], limits)

    def _read(self, header: dict[str, Any], data: memoryview, limits: WireLimits) -> None:
        at = 0
        for number, (name, entry) in enumerate(header.items()):
            if name != str(number) or not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
                raise WireError(f"tensor {number} is not described as it has to be")
            code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            dtype = _DTYPES.get(code) if isinstance(code, str) else None
            if dtype is None:
                raise WireError(f"tensor {number} has the dtype {code!r:.40}, which is not known", "unknown")
            if (
                not _are_sizes(shape)
                or len(shape) > limits.tensor_dims
                or _spans(shape) > _LONGEST
                or not _are_sizes(offsets)
            ):
                raise WireError(f"tensor {number} has a shape or a place that can't be")
            size = math.prod(shape) * dtype.size
            if offsets != [at, at + size] or at + size > len(data):
                raise WireError(f"tensor {number} does not lie where its shape says")
            self._entries[number] = (code, tuple(shape), data[at : at + size])
            at += size
        if at != len(data):
            raise WireError("there are bytes that belong to no tensor")

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, number: Any, library: Library | None = None) -> Any:
        """A tensor or array of its own memory, the same one each time. Raises ``WireError`` if there is none of that
        number. One that is most of a message which can be written into is left where it arrived."""
        entry = self._entries.get(number) if type(number) is int else None
        if entry is None:
            raise WireError(f"there is no tensor {number!r:.20}")
        wanted = library or self._library or _installed()
        if (number, wanted) not in self._made:
            code, shape, raw = entry
            held = raw if len(raw) >= self._large and not raw.readonly else memoryview(bytearray(raw))
            self._made[number, wanted] = (_to_torch if wanted == "torch" else _to_numpy)(code, shape, held)
        return self._made[number, wanted]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 62 for each in value)


def _spans(shape: list[int]) -> int:
    """How many elements the strides of a shape reach over, where some size may be 0."""
    return math.prod(max(size, 1) for size in shape)


def _installed() -> Library:
    try:
        import torch  # noqa: F401
    except ImportError:
        return "numpy"
    return "torch"


def _torch_part(value: Any, what: str) -> tuple[str, list[int], memoryview]:
    import torch

    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_quantized or value.is_meta or name not in _CODES:
        raise ArgumentError(
            f"{what} is a tensor of {name}, {value.layout}, which can't travel: dense ones of bool, int and float can"
        )
    raw = value.detach().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _CODES[name], list(value.shape), memoryview(raw).cast("B")


def _numpy_part(value: Any, what: str) -> tuple[str, list[int], memoryview]:
    import numpy

    name = value.dtype.name
    if name not in _CODES:
        raise ArgumentError(f"{what} is an array of {name}, which can't travel: those of bool, int and float can")
    little = numpy.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    return _CODES[name], list(value.shape), memoryview(little.reshape(-1).view(numpy.uint8).data).cast("B")


def _to_torch(code: str, shape: tuple[int, ...], raw: memoryview) -> Any:
    """In the memory of ``raw``."""
    import torch

    name = _DTYPES[code].name
    dtype = getattr(torch, name)
    if not raw.nbytes:
        return torch.zeros(shape, dtype=dtype)
    if name == "bool":
        return (torch.frombuffer(raw, dtype=torch.uint8) != 0).reshape(shape)
    made = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    return made if made.data_ptr() % dtype.itemsize == 0 else made.clone()


def _to_numpy(code: str, shape: tuple[int, ...], raw: memoryview) -> Any:
    try:
        import numpy
    except ImportError:
        raise ArgumentError("to receive tensors, install numpy or torch") from None
    name = _DTYPES[code].name
    if name == "bool":
        return (numpy.frombuffer(raw, numpy.uint8) != 0).reshape(shape)
    if name == "bfloat16":
        wide = numpy.frombuffer(raw, "<u2").astype("<u4") << numpy.uint32(16)
        return wide.view(numpy.float32).reshape(shape)
    if name.startswith("float8"):
        table = numpy.array([_float8(byte, name) for byte in range(256)], numpy.float32)
        return table[numpy.frombuffer(raw, numpy.uint8)].reshape(shape)
    made = numpy.frombuffer(raw, numpy.dtype(name).newbyteorder("<"))
    return made.astype(name, copy=not made.flags.aligned).reshape(shape)


def _float8(byte: int, name: str) -> float:
    """What a byte means as ``float8_e4m3fn`` (no infinities) or ``float8_e5m2``."""
    exponent_bits = 4 if name == "float8_e4m3fn" else 5
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = byte & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent_bits == 4 and byte & 0x7F == 0x7F:
        return math.nan
    if exponent_bits == 5 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
