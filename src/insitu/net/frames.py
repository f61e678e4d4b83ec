"""Messages as bytes: JSON, and beside it one part of tensors.

A frame is ``ISU1``, the length of the JSON (4 bytes) and of the tensors (8 bytes), both little-endian, and then the
two. A request is one frame, or JSON alone (``application/json``) if it has no tensors. A response is one frame for
each event, one after another.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from insitu.block import ArgumentError
from insitu.net.errors import WireError
from insitu.net.limits import WireLimits

__all__ = ["CONTENT_TYPE", "Frame", "FrameReader", "decode_frame", "decode_json", "encode_frame", "frame_parts"]

CONTENT_TYPE = "application/vnd.insitu"
_MAGIC = b"ISU1"
_HEAD = struct.Struct("<4sIQ")
_PIECE = 1 << 20


Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """One message: what its JSON says, and its part of tensors (``safetensors``, perhaps empty; of one that is to be
    sent, perhaps in pieces)."""

    header: dict[str, Any]
    tensors: Buffer | tuple[Buffer, ...] = b""

    @property
    def pieces(self) -> tuple[Buffer, ...]:
        return self.tensors if isinstance(self.tensors, tuple) else (self.tensors,)

    @property
    def whole(self) -> Buffer:
        """The part of tensors as it arrives."""
        return b"".join(self.tensors) if isinstance(self.tensors, tuple) else self.tensors


def encode_frame(frame: Frame) -> bytes:
    """The bytes of a message."""
    return b"".join((*_heading(frame), *frame.pieces))


def frame_parts(frame: Frame, limits: WireLimits | None = None) -> Iterator[bytes | memoryview]:
    """The same in pieces, for a connection that takes no more at a time than it can send. Raises ``ArgumentError`` at
    once for a message that is larger than a receiver takes."""
    limits = limits or WireLimits()
    head, header = _heading(frame)
    tensors = sum(map(len, frame.pieces))
    for what, size, limit in (("JSON", len(header), limits.header), ("tensors", tensors, limits.tensors)):
        if size > limit:
            raise ArgumentError(
                f"what this request has saved takes {size} bytes of {what}, and a message has at most {limit}: save "
                f"less at once, and numbers as tensors"
            )
    if tensors <= _PIECE:
        return iter((b"".join((head, header, *frame.pieces)),))
    return chain((head + header,), chain.from_iterable(map(_cut, frame.pieces)))


def _cut(piece: Buffer) -> Iterator[memoryview]:
    view = memoryview(piece)
    return (view[at : at + _PIECE] for at in range(0, len(view), _PIECE))


def decode_frame(data: Buffer, limits: WireLimits | None = None) -> Frame:
    """The message that ``data`` is, all of it. Raises ``WireError``."""
    limits = limits or WireLimits()
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise WireError(f"a frame has at least {_HEAD.size} bytes; got {len(view)}")
    header, tensors = _lengths(view[: _HEAD.size], limits)
    start = _HEAD.size + header
    if len(view) != start + tensors:
        raise WireError(f"a frame of {start + tensors} bytes was announced, and {len(view)} came")
    return Frame(decode_json(view[_HEAD.size : start], limits), view[start:])


def decode_json(data: Buffer, limits: WireLimits | None = None) -> dict[str, Any]:
    """The JSON object that ``data`` is. Raises ``WireError``, for a key that comes twice as well."""
    limits = limits or WireLimits()
    if len(data) > limits.header:
        raise WireError(f"{len(data)} bytes of JSON are more than the {limits.header} that are taken", "too-large")
    try:
        value = json.loads(bytes(data).decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise WireError("the JSON is nested too deeply", "too-deep") from None
    except ValueError as error:
        raise error if isinstance(error, WireError) else WireError(f"this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError("a message is a JSON object")
    return value


class FrameReader:
    """Takes bytes as they arrive, and gives the frames in them. Holds no more than one frame may have."""

    def __init__(self, limits: WireLimits | None = None) -> None:
        self._limits = limits or WireLimits()
        self._begin()

    def _begin(self) -> None:
        self._head, self._json, self._tensors = bytearray(), bytearray(), bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. Raises ``WireError`` as soon as one can't be taken."""
        rest = memoryview(data)
        while True:
            rest = _moved(rest, self._head, _HEAD.size)
            if len(self._head) < _HEAD.size:
                return
            header, tensors = _lengths(self._head, self._limits)
            rest = _moved(rest, self._json, header)
            rest = _moved(rest, self._tensors, tensors)
            if len(self._json) < header or len(self._tensors) < tensors:
                return
            frame = Frame(decode_json(self._json, self._limits), memoryview(self._tensors))
            self._begin()
            yield frame

    def close(self) -> None:
        """Nothing more comes. Raises ``WireError`` if the last frame is not whole."""
        if self._head:
            raise WireError("the connection ended in the middle of a frame")


def _moved(rest: memoryview, part: bytearray, size: int) -> memoryview:
    """What ``part`` lacks to ``size`` is moved into it; gives the rest."""
    lacking = size - len(part)
    part += rest[:lacking]
    return rest[lacking:]


def _heading(frame: Frame) -> tuple[bytes, bytes]:
    header = json.dumps(frame.header, separators=(",", ":"), allow_nan=False).encode()
    return _HEAD.pack(_MAGIC, len(header), sum(map(len, frame.pieces))), header


def _lengths(head: Buffer, limits: WireLimits) -> tuple[int, int]:
    magic, header, tensors = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise WireError("this is no frame of insitu's")
    for what, size, limit in (("JSON", header, limits.header), ("tensors", tensors, limits.tensors)):
        if size > limit:
            raise WireError(f"{size} bytes of {what} are more than the {limit} that are taken", "too-large")
    return header, tensors


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("a key comes twice in a JSON object")
    return made


def _no_constant(name: str) -> NoReturn:
    raise WireError(f"{name} is no JSON")
