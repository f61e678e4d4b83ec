"""Large buffers, handed from one process to another of the same machine without being sent.

The sender writes them into memory that has no name in any file system, so that nothing is left
behind whatever dies, and that no size of ``/dev/shm`` limits. The receiver maps it through the sender's table of
open files.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

_SHARED_FROM = 64 * 1024
"""Bytes from which a buffer is worth a mapping of its own; smaller ones travel in the message."""


class Buffers(msgspec.Struct, array_like=True):
    """Where the buffers of one message are. ``sizes`` are all of them, in order; those of at least
    ``_SHARED_FROM`` bytes lie in the file, each at a page of its own, the others are in ``inline``."""

    sizes: list[int]
    inline: list[bytes]
    host: str = ""
    process: int = 0
    file: int = -1
    number: int = 0


class Sender:
    """Keeps what it has lent out until it is told that it was received."""

    def __init__(self) -> None:
        self._lent: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def lend(self, buffers: Sequence[memoryview], receiver: str) -> Buffers:
        """``receiver`` is the ``machine()`` of the other side; one elsewhere gets everything in the message."""
        sizes = [buffer.nbytes for buffer in buffers]
        if receiver != machine() or not any(size >= _SHARED_FROM for size in sizes):
            return Buffers(sizes, [bytes(buffer) for buffer in buffers], host="")
        file = os.memfd_create("insitu")
        os.ftruncate(file, sum(_pages(size) for size in sizes if size >= _SHARED_FROM))
        at, inline = 0, []
        for buffer, size in zip(buffers, sizes, strict=True):
            if size < _SHARED_FROM:
                inline.append(bytes(buffer))
                continue
            _write(file, buffer, at)
            at += _pages(size)
        number = next(self._numbers)
        self._lent[number] = file
        return Buffers(sizes, inline, machine(), os.getpid(), file, number)

    def received(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            file = self._lent.pop(number, None)
            if file is not None:
                os.close(file)

    @property
    def lent(self) -> int:
        """How many messages' memory is still lent out."""
        return len(self._lent)


def opened(buffers: Buffers) -> list[memoryview]:
    """The buffers, each writable and with a lifetime of its own."""
    inline = iter(buffers.inline)
    if not buffers.host:
        return [memoryview(bytearray(part)) for part in inline]
    file = os.open(f"/proc/{buffers.process}/fd/{buffers.file}", os.O_RDWR)
    try:
        at, found = 0, []
        for size in buffers.sizes:
            if size < _SHARED_FROM:
                found.append(memoryview(bytearray(next(inline))))
            else:
                found.append(memoryview(mmap.mmap(file, size, offset=at)))
                at += _pages(size)
        return found
    finally:
        os.close(file)


@cache
def machine() -> str:
    """Equal for two processes that can see each other's open files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}-{os.readlink('/proc/self/ns/pid')}-{os.getuid()}"
    except OSError:
        return ""


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _write(file: int, buffer: memoryview, at: int) -> None:
    rest = buffer.cast("B")
    while rest.nbytes:
        done = os.pwrite(file, rest, at)
        rest, at = rest[done:], at + done
