"""Saved values that no name holds when the block ends, which would be lost in silence."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from .tracebacks import is_library_file

__all__ = ["Line", "Lost", "Unnamed", "line_of"]


Line = tuple[str, int]
"""A file and the number of a line in it."""

_CONTAINERS = (list, tuple, set, frozenset, dict)


class Lost(NamedTuple):
    """What one line of the user's saves in vain."""

    filename: str
    lineno: int
    holder: str | None
    """Name of a list or the like that holds it, but is not saved."""
    deleted: str | None = None
    """The name that it was saved under, if that has no value when the block ends."""

    @property
    def message(self) -> str:
        if self.deleted is not None:
            return (
                f"`{self.deleted}` has no value any more when the block ends, so what this line saves is lost: "
                f"leave `del {self.deleted}` out"
            )
        if self.holder is None:
            return (
                "no name of the block holds what this line saves when the block ends, so it is lost: give it one, "
                "`name = x.save()`, or put it into a list or dict that is saved"
            )
        return (
            f"`{self.holder}` holds what this line saves and is not saved itself, so it is lost: write "
            f"`{self.holder}.save()` in the block"
        )


class Unnamed:
    """Values saved without a name, by the lines that saved them. Keeps none alive that can be held weakly."""

    def __init__(self) -> None:
        self._by_line: dict[Line, list[weakref.ref[Any] | list[Any]]] = {}

    def add(self, value: object, frame: FrameType | None) -> None:
        """Note that the code of `frame`, or of the user's that called it, saves `value`."""
        line = line_of(frame)
        if line is None:
            return
        try:
            held: weakref.ref[Any] | list[Any] = weakref.ref(value)
        except TypeError:
            held = [value]
        self._by_line.setdefault(line, []).append(held)

    def lost(self, namespace: Mapping[str, Any], home: Iterable[str]) -> list[Lost]:
        """Of which lines nothing is in what the names `home` hold, nor anywhere but in names of the block.

        A line counts as a whole: in a loop, later values take the place of earlier ones. What an object holds
        is not lost, for it may be the caller's.
        """
        if not self._by_line:
            return []
        safe = _safe(namespace, home)
        holders: dict[int, str] = {}
        for name, value in namespace.items():
            if isinstance(value, _CONTAINERS) and not name.startswith("__"):  # others may be equal numbers
                for part in _parts(value):
                    holders.setdefault(id(part), name)
        return list(self._lost(safe, holders))

    def all_home(self, namespace: Mapping[str, Any], home: Iterable[str]) -> bool:
        """Whether of each line something is in what the names ``home`` hold."""
        safe = _safe(namespace, home) if self._by_line else set()
        return not any(safe.isdisjoint(map(_identity, values)) for values in self._by_line.values())

    def _lost(self, safe: set[int], holders: Mapping[int, str]) -> Iterator[Lost]:
        for (filename, lineno), values in self._by_line.items():
            there = [_identity(held) for held in values]
            if not safe.isdisjoint(there):
                continue
            holder = next((holders[key] for key in there if key in holders), None)
            if holder is not None or not any(_is_held_elsewhere(held) for held in values):
                yield Lost(filename, lineno, holder)


def line_of(frame: FrameType | None) -> Line | None:
    """The line of the user's that `frame`, or what called it, is at."""
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _safe(namespace: Mapping[str, Any], home: Iterable[str]) -> set[int]:
    return {id(part) for name in home if name in namespace for part in _parts(namespace[name])}


def _identity(held: weakref.ref[Any] | list[Any]) -> int:
    value = held[0] if isinstance(held, list) else held()
    return 0 if value is None else id(value)


def _is_held_elsewhere(held: weakref.ref[Any] | list[Any]) -> bool:
    if isinstance(held, list):
        return sys.getrefcount(held[0]) > 3  # this list's, that of `Saves` and the argument
    return held() is not None


def _parts(value: Any) -> Iterator[Any]:
    """A value, and what is in it if it is a list or the like, at any depth."""
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, _CONTAINERS) and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)
