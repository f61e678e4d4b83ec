"""Things of the caller that a block changes in another process: the changes come home.

In one process a block that appends to a list of its caller, or adds to its tensor, changes that very object.
Here a copy is changed in the worker, and what has changed is done again to the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .leaves import OTHER, Leaf, leaf_of
from .states import State, has_state, inside, is_other, put, state_of


@dataclass(frozen=True)
class Same:
    """Something that was sent along, by its number."""

    number: int


@dataclass(frozen=True)
class Kept:
    """Something that was in one of these before."""

    number: int
    key: Any


@dataclass(frozen=True)
class Content:
    """The new content of something without parts."""

    value: Any


@dataclass(frozen=True)
class Lost:
    """A change that can't travel."""


@dataclass(frozen=True)
class Parts:
    """New items, if not None, names that have a new value, and those that are gone."""

    items: Any
    names: dict[Any, Any]
    gone: list[Any]


def changeable(roots: Iterable[Any]) -> list[Any]:
    """All that a block can change and that can be reached from ``roots``: containers, tensors, arrays, objects and
    classes of the user's own, modules, and what functions close over or use of their module."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = list(roots)[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _SMALL) or id(value) in seen:
            continue
        seen[id(value)] = value
        if has_state(value) or _leaf(value) is not None:
            found.append(value)
        waiting += list(inside(value))[::-1]
    return found


class Shared:
    """The worker's end: what it was sent, and how that was before the block ran."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._before = [_snapshot(node) for node in nodes]
        self._numbers = {id(node): number for number, node in enumerate(nodes)}
        self._origin = {
            id(part): Kept(number, key)
            for number, before in enumerate(self._before)
            if isinstance(before, State)
            for key, part in before.parts()
            if not isinstance(part, _SMALL)
        }

    def changes(self, hindrance: Callable[[Any], Any] = lambda value: None) -> dict[int, Any]:
        """What has changed, by number. What was sent along is in it by reference.

        ``hindrance`` says why something can't travel; None if it can.
        """
        found = {number: self._change(node, self._before[number]) for number, node in enumerate(self._nodes)}
        changes = {number: change for number, change in found.items() if change is not None}
        if changes and hindrance(changes) is not None:
            return {number: Lost() if hindrance(change) else change for number, change in changes.items()}
        return changes

    def _change(self, node: Any, before: Any) -> Any:
        now = _snapshot(node)
        if not isinstance(before, State):
            leaf = _leaf(node)
            return Content(leaf.content(node)) if leaf is not None and now != before else None
        names = {name: part for name, part in now.names.items() if not _is_one(before.names.get(name, _NONE), part)}
        gone = [name for name in before.names if name not in now.names]
        same = _same_items(now.items, before.items)
        if same and not names and not gone:
            return None
        return Parts(None if same else _mapped(now.items, self._named), _mapped(names, self._named), gone)

    def _named(self, part: Any) -> Any:
        if isinstance(part, _SMALL):
            return part
        number = self._numbers.get(id(part))
        return Same(number) if number is not None else self._origin.get(id(part), part)


def apply(nodes: list[Any], changes: dict[int, Any]) -> list[Any]:
    """The client's end: does ``changes`` to the originals. Returns those to which it can't be done."""
    before = {number: state_of(node) for number, node in enumerate(nodes) if _leaf(node) is None}

    def meant(part: Any) -> Any:
        if isinstance(part, Same):
            return nodes[part.number]
        return before[part.number].part(part.key) if isinstance(part, Kept) else part

    refused = []
    for number, change in changes.items():
        try:
            _apply(nodes[number], change, meant)
        except Exception:
            refused.append(nodes[number])
    return refused


def _apply(node: Any, change: Any, meant: Callable[[Any], Any]) -> None:
    if isinstance(change, Parts):
        put(node, _mapped(change.items, meant), _mapped(change.names, meant), change.gone)
        return
    leaf = _leaf(node)
    if isinstance(change, Lost) or leaf is None or leaf.put is None:
        raise TypeError(f"{type(node).__name__} can't be changed from outside")
    leaf.put(node, change.value)


_SMALL = (str, bytes, int, float, bool, complex, type(None))
_NONE = object()


def _snapshot(node: Any) -> Any:
    leaf = _leaf(node)
    return state_of(node) if leaf is None else leaf.mark(node)


def _leaf(value: Any) -> Leaf | None:
    leaf = leaf_of(value)
    return OTHER if leaf is None and not has_state(value) and is_other(value) else leaf


def _mapped(content: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(content, dict):
        return {convert(key): convert(part) for key, part in content.items()}
    if isinstance(content, set):
        return set(map(convert, content))
    return list(map(convert, content)) if isinstance(content, list) else content


def _is_one(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _SMALL) and old == new)


def _same_items(items: Any, before: Any) -> bool:
    if items is None or before is None:
        return items is before
    if len(items) != len(before):
        return False
    if isinstance(items, set):
        return items == before
    if isinstance(items, list):
        return all(map(_is_one, before, items))
    pairs = zip(items.items(), before.items(), strict=True)
    return all((key is old_key or key == old_key) and _is_one(old, part) for (key, part), (old_key, old) in pairs)
