"""How much of the host's memory is page-locked, which is what a GPU copies into at the full speed of its link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

_AT_ANY_TIME = 2**32
_SLOWER = 2
"""Bytes that go the slower way, by ordinary memory, for each one that is locked beyond that: to lock it takes twice as
long as it saves once."""
_KEPT_FREE = 4
"""What part of the machine's memory is left to others: a fourth."""


_BY_THREADS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def lock_by_threads() -> None:
    """torch asks CUDA for locked memory, which takes a second for 1.4 GB on an H200's host and holds up whoever starts
    kernels meanwhile; or, told to, has threads put the pages there first, 2 to 6 times as fast."""
    get: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    choose: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if get is None or choose is None or "pinned_use_cuda_host_register" in (given := get() or ""):
        return
    with suppress(RuntimeError):
        choose(f"{given},{_BY_THREADS}" if given else _BY_THREADS)


class Pinned:
    """Counts what was handed out, by the sizes in which torch locks memory: powers of two. torch keeps what comes
    back, for memory of the same size, so that it is locked once."""

    def __init__(self, available: Callable[[], tuple[int, int]] | None = None) -> None:
        """``available``: bytes of the machine's memory that nobody uses, and all of them."""
        self.used: int = 0
        self._locked = 0
        self._slow = 0
        self._free: Counter[int] = Counter()
        self._available = available or _available

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether there is room for memory of these sizes, in bytes; what has none goes another way, and is counted."""
        wanted = Counter(map(_rounded, sizes))
        more = sum(size * max(0, count - self._free[size]) for size, count in wanted.items())
        if more == 0 or self._locked + more <= _AT_ANY_TIME:
            return True
        free, total = self._available()
        room = free - more >= total // _KEPT_FREE and self._locked + more - _AT_ANY_TIME <= self._slow // _SLOWER
        self._slow += 0 if room else sum(sizes)
        return room

    def take(self, size: int) -> None:
        self.used += size
        size = _rounded(size)
        if self._free[size]:
            self._free[size] -= 1
        else:
            self._locked += size

    def give_back(self, size: int) -> None:
        self.used -= size
        self._free[_rounded(size)] += 1


def _rounded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _available() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no limit, or no such file
        return memory.available, memory.total
    return min(memory.available, limit - used), min(memory.total, limit)
