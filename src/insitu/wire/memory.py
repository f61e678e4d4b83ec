"""Memory in files that have no name in any file system, so that nothing is left behind whatever dies, and that no
size of ``/dev/shm`` limits.

A file is written by one thread at a time, whose kernel gives it page by page; so what is large lies in several, which
several threads write, and is mapped as one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Thread
from typing import Any

Parts = Sequence[tuple[int, memoryview]]
"""What a file holds: each from which byte on."""

MOST_THREADS = 8
_MAP_FIXED = 0x10


def written(contents: Sequence[tuple[int, Parts]]) -> list[int]:
    """New files, open, each of so many bytes with such parts."""
    files: list[int] = []
    try:
        for size, _ in contents:
            files.append(os.memfd_create("insitu"))
            os.ftruncate(files[-1], size)
        threads = min(len(files), len(os.sched_getaffinity(0)), MOST_THREADS)
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_write, files, (parts for _, parts in contents)))
        else:
            for file, (_, parts) in zip(files, contents, strict=True):
                _write(file, parts)
    except BaseException:
        _close(files)
        raise
    return files


def let_go(files: Sequence[int]) -> None:
    """Closes what was ``written``. Nobody waits for the kernel to take back the memory of many, if that is not mapped
    any more."""
    if len(files) > 1:
        Thread(target=_close, args=(files,), name="insitu-close").start()
    else:
        _close(files)


def mapped(files: Sequence[int], sizes: Sequence[int]) -> memoryview:
    """Files of so many bytes each, which are whole pages, one after another. They may be closed then, and are
    unmapped once nothing refers to any part."""
    whole = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    for file, size in zip(files, sizes, strict=True):
        # In the place of what the object has mapped, which unmaps that range when it goes: one of mmap's own for each
        # would keep a file open each.
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc().mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != at:
            raise OSError(ctypes.get_errno(), f"{size} bytes can't be mapped: {os.strerror(ctypes.get_errno())}")
        at += size
    return memoryview(whole)


def pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return libc


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _write(file: int, parts: Parts) -> None:
    for at, part in parts:
        rest = part
        while rest.nbytes:
            done = os.pwrite(file, rest, at)
            rest, at = rest[done:], at + done
