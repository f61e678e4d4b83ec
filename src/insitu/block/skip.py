"""Leaving a `with` body before its first instruction.

The instruction after the call of `__enter__` binds the `as` target, or drops the value. It is inside the
`with` and before all of the body, whatever the body begins with. Raising there goes straight to `__exit__`,
past no `except` or `finally` of the user's.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Protocol

from . import monitored
from .traced import TracedSkip

__all__ = ["Skip", "skip_body"]


class Skip(Protocol):
    """One skipping of one body."""

    def arm(self) -> None:
        """Have the body skipped. Nothing but returning to the frame may follow."""
        ...

    def disarm(self, error: BaseException | None) -> bool:
        """Undo it; whether `error` is what left the body."""
        ...


def skip_body(frame: FrameType, first: int) -> Skip:
    """The way that this Python has to skip the body that begins with the instruction at offset `first`."""
    if sys.version_info >= (3, 12) and monitored.available():
        return monitored.MonitoredSkip(frame, first)
    return TracedSkip(frame, first)
