"""Large buffers, handed from one process to another of the same machine without being sent.

The sender writes them into memory that has no name, and the receiver maps it through the sender's table of open files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from .memory import Parts, let_go, mapped, pages, written

_SHARED_FROM = 64 * 1024
"""Bytes from which a buffer is worth pages of its own; smaller ones travel in the message."""
_LEAST_PIECE, _PIECES = 2**22, 16
"""A file has at least so many bytes, and a message's memory lies in about so many files if it is larger."""


class Buffers(msgspec.Struct, array_like=True):
    """Where the buffers of one message are. ``sizes`` are all of them, in order; those of at least
    ``_SHARED_FROM`` bytes lie in the files, laid out as ``_spans`` says, the others are in ``inline``."""

    sizes: list[int]
    inline: list[bytes]
    host: str = ""
    process: int = 0
    files: list[int] = []
    number: int = 0


class _Span(NamedTuple):
    """The buffers of these numbers, each from so many bytes on: in one file, or one buffer in several, of so many
    bytes each. What is left of any of them keeps the memory of all."""

    places: list[tuple[int, int]]
    files: list[int]


def _spans(sizes: Sequence[int]) -> Iterator[_Span]:
    """How both ends lay out buffers of these sizes."""
    large = [number for number, size in enumerate(sizes) if size >= _SHARED_FROM]
    piece = max(_LEAST_PIECE, pages(sum(pages(sizes[number]) for number in large) // _PIECES))
    places: list[tuple[int, int]] = []
    end = 0
    for number in large:
        places.append((number, end))
        end += pages(sizes[number])
        if end >= piece or number == large[-1]:
            yield _Span(places, [min(piece, end - at) for at in range(0, end, piece)])
            places, end = [], 0


class Sender:
    """Keeps what it has lent out until it is told that it was received."""

    def __init__(self) -> None:
        self._lent: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)

    def lend(self, buffers: Sequence[memoryview], receiver: str) -> Buffers:
        """``receiver`` is the ``machine()`` of the other side; one elsewhere gets everything in the message."""
        buffers = [buffer.cast("B") for buffer in buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        spans = list(_spans(sizes)) if receiver and receiver == machine() else []
        if not spans:
            return Buffers(sizes, [bytes(buffer) for buffer in buffers])
        inline = [bytes(buffer) for buffer in buffers if buffer.nbytes < _SHARED_FROM]
        files = written([content for span in spans for content in _contents(span, buffers)])
        number = next(self._numbers)
        self._lent[number] = files
        return Buffers(sizes, inline, machine(), os.getpid(), files, number)

    def received(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            let_go(self._lent.pop(number, ()))

    @property
    def lent(self) -> int:
        """How many messages' memory is still lent out."""
        return len(self._lent)


def _contents(span: _Span, buffers: Sequence[memoryview]) -> Iterator[tuple[int, Parts]]:
    """Of each file: its size, and what it holds."""
    start = 0
    for size in span.files:
        end = start + size
        yield (
            size,
            [
                (max(at - start, 0), part)
                for number, at in span.places
                if (part := buffers[number][max(start - at, 0) : max(end - at, 0)]).nbytes
            ],
        )
        start = end


def opened(buffers: Buffers) -> list[memoryview]:
    """The buffers, each writable."""
    inline = iter(buffers.inline)
    if not buffers.host:
        return [memoryview(bytearray(part)) for part in inline]
    sizes, files = buffers.sizes, iter(buffers.files)
    large: dict[int, memoryview] = {}
    for span in _spans(sizes):
        memory = _of(buffers.process, [next(files) for _ in span.files], span.files)
        large.update((number, memory[at : at + sizes[number]]) for number, at in span.places)
    return [large[number] if number in large else memoryview(bytearray(next(inline))) for number in range(len(sizes))]


def _of(process: int, files: Sequence[int], sizes: Sequence[int]) -> memoryview:
    """What lies in another process's open files."""
    ours: list[int] = []
    try:
        ours.extend(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC) for file in files)
        return mapped(ours, sizes)
    finally:
        for file in ours:
            os.close(file)


@cache
def machine() -> str:
    """Equal for two processes that can see each other's open files; nothing where none can."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}-{os.readlink('/proc/self/ns/pid')}-{os.getuid()}"
    except OSError:
        return ""
