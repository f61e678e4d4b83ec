"""Skipping a body by `sys.monitoring` (Python 3.12), which leaves debuggers and coverage alone.

The code with the `with` in it stays watched; every instruction but the one wanted is disabled when it first
runs, so that it costs nothing afterwards. Nothing is switched on and off: that is not safe between threads.
"""

# `sys.monitoring` is not there for a type checker that assumes an older Python.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType

__all__ = ["BodySkipped", "MonitoredSkip", "available"]

_NAME = "insitu"
_FREE_IDS = (4, 3)  # those that are not set aside for debuggers, coverage, profilers and optimisers

_tool: int | None = None


class BodySkipped(BaseException):
    """Raised in the caller's frame to leave the body; never seen outside the manager."""


class _Watched:
    """What is known of a code object that is watched."""

    def __init__(self, code: CodeType) -> None:
        key = id(code)
        self.code = weakref.ref(code, lambda _, watched=_watched: watched.pop(key, None))
        self.firsts: set[int] = set()
        self.disabled: set[int] = set()


_watched: dict[int, _Watched] = {}
_armed: dict[int, MonitoredSkip] = {}  # by the id of the frame, which they keep alive


def available() -> bool:
    """Whether there is a tool id to be had."""
    global _tool
    if _tool is not None:
        return True
    monitoring = sys.monitoring
    for tool in _FREE_IDS:
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, _NAME)
            monitoring.register_callback(tool, monitoring.events.INSTRUCTION, _at_instruction)
            _tool = tool
            return True
    return False


class MonitoredSkip:
    """One skipping of one body."""

    def __init__(self, frame: FrameType, first: int) -> None:
        self._frame = frame
        self._first = first
        self.signal: BodySkipped = BodySkipped()

    def arm(self) -> None:
        """Have the body skipped."""
        _watch(self._frame.f_code, self._first)
        _armed[id(self._frame)] = self

    def disarm(self, error: BaseException | None) -> bool:
        """Undo it; whether `error` is what left the body."""
        _armed.pop(id(self._frame), None)
        ours = error is self.signal
        self.signal.__traceback__ = None  # it leads to frames that lead to it
        del self._frame, self.signal
        return ours

    def is_for(self, frame: FrameType, offset: int) -> bool:
        """Whether this is where the body is to be skipped."""
        return frame is self._frame and offset == self._first


def _watch(code: CodeType, first: int) -> None:
    known = _watched.get(id(code))
    if known is None or known.code() is not code:
        known = _watched[id(code)] = _Watched(code)
        known.firsts.add(first)
        sys.monitoring.set_local_events(_tool, code, sys.monitoring.events.INSTRUCTION)
    elif first not in known.firsts:
        known.firsts.add(first)
        if first in known.disabled:
            known.disabled.clear()
            sys.monitoring.restart_events()


def _at_instruction(code: CodeType, offset: int) -> object:
    known = _watched.get(id(code))
    if known is None or offset not in known.firsts:
        if known is not None:
            known.disabled.add(offset)
        return sys.monitoring.DISABLE
    frame = sys._getframe(1)
    skip = _armed.get(id(frame))
    if skip is not None and skip.is_for(frame, offset):
        raise skip.signal
    return None
