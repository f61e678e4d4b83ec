"""How much of the host's memory is page-locked, which is what a GPU copies into at the full speed of its link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_AT_ANY_TIME = 2**32
_KEPT_FREE = 4
"""What part of the machine's memory is left to others: a fourth."""


class Pinned:
    """Counts what was handed out, by the sizes in which torch locks memory: powers of two. torch keeps what comes
    back, for memory of the same size, so that it is locked once."""

    def __init__(self, available: Callable[[], tuple[int, int]] | None = None) -> None:
        """``available``: bytes of the machine's memory that nobody uses, and all of them."""
        self.used: int = 0
        self._locked = 0
        self._free: Counter[int] = Counter()
        self._available = available or _available

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether there is room for memory of these sizes, in bytes."""
        wanted = Counter(map(_rounded, sizes))
        more = sum(size * max(0, count - self._free[size]) for size, count in wanted.items())
        if more == 0 or self._locked + more <= _AT_ANY_TIME:
            return True
        free, total = self._available()
        return free - more >= total // _KEPT_FREE

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
