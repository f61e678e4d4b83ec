"""Skipping a body by `sys.settrace`, for Pythons without `sys.monitoring`."""

from __future__ import annotations

import sys
from types import FrameType, FunctionType, MethodType
from typing import Any

from .monitored import BodySkipped

__all__ = ["TracedSkip"]


class TracedSkip:
    """One skipping of one body. Whoever was tracing goes on afterwards."""

    def __init__(self, frame: FrameType, first: int) -> None:
        self._frame = frame
        self._first = first
        self._signal = BodySkipped()

    def arm(self) -> None:
        """Have the body skipped: trace the frame, and only that, instruction by instruction."""
        frame = self._frame
        self._tracer = sys.gettrace()
        self._trace_of_frame = frame.f_trace
        self._events = (frame.f_trace_lines, frame.f_trace_opcodes)
        # 3.12 looks at `f_trace_opcodes` when tracing is turned on.
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        frame.f_trace = self._trace
        sys.settrace(_ignore)

    def disarm(self, error: BaseException | None) -> bool:
        """Undo it; whether `error` is what left the body."""
        frame = self._frame
        if sys.gettrace() is not self._tracer:
            sys.settrace(self._tracer)
            _report_calls(self._tracer, frame)
        frame.f_trace = self._trace_of_frame
        frame.f_trace_lines, frame.f_trace_opcodes = self._events
        ours = error is self._signal
        self._signal.__traceback__ = None  # it leads to frames that lead to it
        del self._frame, self._signal, self._tracer, self._trace_of_frame
        return ours

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_lasti == self._first:
            raise self._signal
        return self._trace


def _report_calls(tracer: Any, caller: FrameType) -> None:
    """Tell a tracer written in C, as coverage's is, of our own frames: it saw no call, but will see them return."""
    if tracer is None or isinstance(tracer, (FunctionType, MethodType)):
        return
    frames: list[FrameType] = []
    frame = sys._getframe(1)
    while frame is not caller and frame.f_back is not None:
        frames.append(frame)
        frame = frame.f_back
    for frame in reversed(frames):
        frame.f_trace = tracer(frame, "call", None)


def _ignore(frame: FrameType, event: str, arg: object) -> None:
    return None
