"""Containers and objects of the caller that a block changes in another process: the changes come home.

In one process a block that appends to a list of its caller, or sets an attribute of an object, changes that
very object. Here a copy is changed in the worker, and what has changed is done again to the original.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .modules import is_users_class

_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class Same:
    """A container or object that was sent along, by its number."""

    number: int


@dataclass(frozen=True)
class Kept:
    """Something that was in one of these before."""

    number: int
    key: Any


def changeable(roots: Iterable[Any]) -> list[Any]:
    """The lists, dicts, sets and objects of the user's own classes that can be reached from ``roots``: their
    contents, attributes, and what functions close over or use of their module."""
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    waiting = list(roots)[::-1]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if type(value) in _CONTAINERS or is_users_class(type(value)):
            found[id(value)] = value
        waiting += list(_inside(value))[::-1]
    return list(found.values())


class Shared:
    """The worker's end: what it was sent, and how that was before the block ran."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._before = [_content(node) for node in nodes]
        self._numbers = {id(node): number for number, node in enumerate(nodes)}
        self._origin = {
            id(part): Kept(number, key)
            for number, content in enumerate(self._before)
            for key, part in _parts(content)
            if not isinstance(part, _SMALL)
        }

    def changes(self) -> dict[int, Any]:
        """The new contents of what has changed, by number. What was sent along is in them by reference."""
        contents = {number: _content(node) for number, node in enumerate(self._nodes)}
        return {
            number: _mapped(content, self._named)
            for number, content in contents.items()
            if not _is_same(content, self._before[number])
        }

    def _named(self, part: Any) -> Any:
        number = self._numbers.get(id(part))
        return Same(number) if number is not None else self._origin.get(id(part), part)


def apply(nodes: list[Any], changes: dict[int, Any]) -> None:
    """The client's end: does ``changes`` to the originals."""
    before = [_content(node) for node in nodes]

    def meant(part: Any) -> Any:
        if isinstance(part, Same):
            return nodes[part.number]
        if isinstance(part, Kept):
            return dict(_parts(before[part.number]))[part.key]
        return part

    for number, content in changes.items():
        _replace(nodes[number], _mapped(content, meant))


_SMALL = (str, bytes, int, float, bool, complex, type(None))


def _inside(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        yield from value
    elif type(value) is dict:
        yield from value.values()
    elif isinstance(value, types.FunctionType):
        yield from _used(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif is_users_class(type(value)):
        yield from getattr(value, "__dict__", {}).values()


def _used(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from function.__defaults__ or ()
    names = [name for name in _names(function.__code__) if name in function.__globals__]
    if is_users_class(function):
        yield from (function.__globals__[name] for name in names)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(node: Any) -> Any:
    return type(node)(node) if type(node) in _CONTAINERS else dict(vars(node))


def _parts(content: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(content, dict):
        yield from content.items()
    elif isinstance(content, list):
        yield from enumerate(content)


def _mapped(content: Any, convert: Any) -> Any:
    if isinstance(content, dict):
        return {key: convert(part) for key, part in content.items()}
    return type(content)(map(convert, content)) if isinstance(content, list) else content


def _is_same(content: Any, before: Any) -> bool:
    if len(content) != len(before):
        return False
    if isinstance(content, set):
        return content == before
    pairs = zip(_parts(content), _parts(before), strict=True)
    return all((key is old_key or key == old_key) and part is old for (key, part), (old_key, old) in pairs)


def _replace(node: Any, content: Any) -> None:
    if isinstance(node, list):
        node[:] = content
    elif isinstance(node, (dict, set)):
        node.clear()
        node.update(content)
    else:
        vars(node).clear()
        vars(node).update(content)
