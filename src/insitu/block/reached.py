"""What the functions that a block calls use by names of their own: closures, and globals of their modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

from .names import reads

__all__ = ["reached"]

_reads = lru_cache(512)(reads)


def reached(values: Iterable[Any]) -> dict[int, Any]:
    """Lists, dicts and sets that functions among `values`, and those which these call by name, use; by id.

    What is in them is among them. Functions of other modules are not followed from one that is.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    pending: list[Any] = [value for value in values if isinstance(value, (FunctionType, MethodType))]
    while pending:
        top = pending.pop()
        value: Any = top.__func__ if isinstance(top, MethodType) else top
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in (list, dict, set):
            found[id(value)] = value
            pending += value.values() if type(value) is dict else value
        elif type(value) is tuple:
            pending += value
        elif isinstance(value, FunctionType):
            pending += (part for part in _used(value) if not _is_foreign(part, value))
    return found


def _used(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in _reads(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _is_foreign(part: Any, function: FunctionType) -> bool:
    return isinstance(part, FunctionType) and part.__globals__ is not function.__globals__
