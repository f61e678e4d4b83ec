"""The Python function behind something that can be called, and the same with stops in it."""

from __future__ import annotations

from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from insitu.block import LocationError
from insitu.run.source import Rewritten, Stop, rewritten


@dataclass(frozen=True)
class Opened:
    """Two functions, ``function`` as its author wrote it and ``outer`` with its decorators, and its ``self``."""

    text: Rewritten
    function: Any
    outer: Any
    owner: Any

    def stopping(self, stop: Stop) -> Any:
        """What can be called in its place, with each operation handed to ``stop``."""
        made = _decorated(self.outer, self.function, self.text.bound(self.function, stop))
        return made if self.owner is None else MethodType(made, self.owner)

    def callee(self, name: str) -> Any:
        """What an operation calls. Raises ``LookupError`` if that can't be told before it runs."""
        return self.text.callee(name, self.function, self.owner)


def opened(called: Any, what: str) -> Opened:
    """Raises ``LocationError``, which speaks of ``what``, if there is no Python text behind it."""
    outer: Any = called
    owner: Any = None
    if isinstance(called, MethodType):
        outer, owner = called.__func__, called.__self__
    elif not isinstance(called, FunctionType):
        outer, owner = vars(type(called)).get("__call__"), called
    if not isinstance(outer, FunctionType):
        kind = getattr(called, "__qualname__", type(called).__name__)
        raise LocationError(f"{what} is not written in Python ({kind}): no operations in it can be named")
    function: FunctionType = outer
    while inner := _wrapped(function):
        function = inner
    return Opened(rewritten(function), function, outer, owner)


def _wrapped(function: FunctionType) -> FunctionType | None:
    """What a decorator's function calls, where it has it from its closure."""
    inner = getattr(function, "__wrapped__", None)
    held = any(_holds(cell, inner) for cell in function.__closure__ or ())
    return inner if held and isinstance(inner, FunctionType) else None


def _decorated(outer: FunctionType, function: FunctionType, made: FunctionType) -> FunctionType:
    """As ``outer``, whose decorators are around ``function``, around ``made``."""
    if outer is function:
        return made
    inner = _wrapped(outer)
    assert inner is not None, "there is a decorator as long as the function is not reached"
    replaced = _decorated(inner, function, made)
    closure = tuple(CellType(replaced) if _holds(cell, inner) else cell for cell in outer.__closure__ or ())
    again = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    again.__kwdefaults__ = outer.__kwdefaults__
    again.__dict__.update(outer.__dict__)
    return again


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # not bound yet
        return False
