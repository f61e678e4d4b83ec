"""The `with` statement that is being entered: its block, its scope, and how its body is skipped."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .block import Block
from .errors import SourceError
from .locate import Entry, find
from .offsets import first_inside
from .scope import Scope
from .skip import skip_body
from .source import future_flags, sources
from .target import Target
from .verify import is_source_of

__all__ = ["Site"]

_FRAMES_FOR_TREES = 5000

_FUNCTION_FORM = (
    "Use the function form, which needs no source: write the block as a function of the tracer "
    "and call `model.run(fn, prompt)`"
)


class _Capture(NamedTuple):
    """All that can be known of a `with` item before it is entered again."""

    block: Block
    target: Target | None
    first: int
    """Offset of the first instruction of the body."""


class Site:
    """Made in a manager's `__enter__`; holds the caller's frame until `left`."""

    def __init__(self, frame: FrameType) -> None:
        capture = _captured(frame)
        self.block: Block = capture.block
        self.scope: Scope = Scope(frame)
        self._target = capture.target
        self._skip = skip_body(frame, capture.first)
        self._value: Any = None

    @classmethod
    def here(cls, depth: int = 1) -> Site:
        """The `with` being entered `depth` frames above the caller of this method."""
        return cls(sys._getframe(depth + 1))

    def skip(self, value: Any) -> None:
        """Have the body skipped. The `as` target gets `value`. Call it last in `__enter__`."""
        self._value = value
        self._skip.arm()

    def left(self, exc_type: type[BaseException] | None, exc: BaseException | None) -> bool:
        """To be called first in `__exit__`: whether the body was skipped, so that `__exit__` returns True.

        Any other exception is the caller's own business and is to go on its way.
        """
        ours = self._skip.disarm(exc)
        value, self._value = self._value, None
        if ours:
            self.bind_target(value)
        if not ours and exc is None:
            raise SourceError(
                f"the body of the `with` at {self.block.filename}:{self.block.lineno} could not be kept from "
                f"running in the caller. {_FUNCTION_FORM}"
            )
        return ours

    def bind_target(self, value: Any) -> None:
        """Give the `as` target, if there is one, a value."""
        if self._target is not None:
            self._target.bind(self.scope, value)


# A code object is compiled once for every version of its source, so what is found for it stays right.
_captures: dict[int, tuple[weakref.ref[CodeType], dict[int, _Capture]]] = {}


def _captured(frame: FrameType) -> _Capture:
    code = frame.f_code
    known = _captures.get(id(code))
    if known is None or known[0]() is not code:
        key = id(code)
        known = _captures[key] = (weakref.ref(code, lambda _, captures=_captures: captures.pop(key, None)), {})
    capture = known[1].get(frame.f_lasti)
    if capture is None:
        with _room_to_recurse():
            capture = known[1][frame.f_lasti] = _capture(frame)
    return capture


_capturing = threading.RLock()  # the recursion limit and the filters of warnings are the whole process's


@contextmanager
def _room_to_recurse() -> Iterator[None]:
    """Python parses longer chains of `elif` and `+` than its recursion limit lets Python code walk."""
    with _capturing:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + _FRAMES_FOR_TREES)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)


def _capture(frame: FrameType) -> _Capture:
    code = frame.f_code
    entry = Entry.of(frame)
    if entry is None:
        raise SourceError(
            f"a trace has to be entered by a `with` statement, whose body can be taken from the source; "
            f"at {code.co_filename}:{frame.f_lineno} it is entered by a call. {_FUNCTION_FORM}"
        )
    candidates = 0
    for source in sources(frame):
        candidates += 1
        place = find(source.tree, entry)
        if place is None or not is_source_of(source, place, code):
            continue
        qualname = getattr(code, "co_qualname", place.qualname)
        block = Block.of_with(place, code.co_filename, code.co_name, qualname, future_flags(code))
        variables = place.node.items[place.item].optional_vars
        target = None if variables is None else Target(variables, place.class_name)
        return _Capture(block, target, first_inside(code, frame.f_lasti))
    where = f"the `with` at {code.co_filename}:{frame.f_lineno}"
    if candidates and not code.co_filename.startswith("<"):
        raise SourceError(
            f"{code.co_filename} is not what was imported any more, so the block of {where} can't be taken "
            f"from it: it was edited since. Import it again. {_FUNCTION_FORM}"
        )
    raise SourceError(f"the source of {where} can't be found. {_FUNCTION_FORM}")
