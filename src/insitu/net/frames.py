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


class Frame(NamedTuple):
    """One message: what its JSON says, and its part of tensors (``safetensors``, perhaps empty)."""

    header: dict[str, Any]
    tensors: memoryview | bytes = b""


def encode_frame(frame: Frame) -> bytes:
    """The bytes of a message."""
    return b"".join((*_heading(frame), frame.tensors))


def frame_parts(frame: Frame, limits: WireLimits | None = None) -> Iterator[bytes | memoryview]:
    """The same in pieces, for a connection that takes no more at a time than it can send. Raises ``ArgumentError`` at
    once for a message that is larger than a receiver takes."""
    limits = limits or WireLimits()
    head, header = _heading(frame)
    tensors = memoryview(frame.tensors)
    for what, size, limit in (("JSON", len(header), limits.header), ("tensors", len(tensors), limits.tensors)):
        if size > limit:
            raise ArgumentError(
                f"what this request has saved takes {size} bytes of {what}, and a message has at most {limit}: save "
                f"less at once, and numbers as tensors"
            )
    if len(tensors) <= _PIECE:
        return iter((b"".join((head, header, tensors)),))
    return chain((head + header,), (tensors[at : at + _PIECE] for at in range(0, len(tensors), _PIECE)))


def decode_frame(data: bytes | bytearray | memoryview, limits: WireLimits | None = None) -> Frame:
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


def decode_json(data: bytes | memoryview, limits: WireLimits | None = None) -> dict[str, Any]:
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
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. Raises ``WireError`` as soon as one can't be taken."""
        self._waiting += data
        while len(self._waiting) >= _HEAD.size:
            size = _HEAD.size + sum(_lengths(self._waiting[: _HEAD.size], self._limits))
            if len(self._waiting) < size:
                return
            if len(self._waiting) == size:  # as it nearly always is: handed on, not copied
                whole, self._waiting = self._waiting, bytearray()
            else:
                whole = self._waiting[:size]
                del self._waiting[:size]
            yield decode_frame(whole, self._limits)

    def close(self) -> None:
        """Nothing more comes. Raises ``WireError`` if the last frame is not whole."""
        if self._waiting:
            raise WireError("the connection ended in the middle of a frame")


def _heading(frame: Frame) -> tuple[bytes, bytes]:
    header = json.dumps(frame.header, separators=(",", ":"), allow_nan=False).encode()
    return _HEAD.pack(_MAGIC, len(header), len(frame.tensors)), header


def _lengths(head: bytes | bytearray | memoryview, limits: WireLimits) -> tuple[int, int]:
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
