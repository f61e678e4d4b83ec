"""Lists, dicts and sets that a block takes from its caller: copied on the way in, compared afterwards.

A name that was not saved keeps what it had before, so a block works on copies. Only the containers are
copied; tensors, models and other objects in them are the same ones. A container that a function of the block
uses too, by a name of its own, is not copied: both have to mean the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

from .errors import ArgumentError
from .reached import reached

__all__ = ["changed", "copied"]

_KINDS = frozenset((list, dict, set, tuple))


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every list, dict and set in them copied, at any depth; what was shared stays shared.

    Those that functions among `values` use are left as they are.

    Raises `ArgumentError` for a value nested more deeply than Python can go.
    """
    memo = reached(values.values()) if any(type(value) in _KINDS for value in values.values()) else {}
    copies: dict[str, Any] = {}
    for name, value in values.items():
        try:
            copies[name] = _copy(value, memo)
        except RecursionError:
            raise ArgumentError(
                f"`{name}`, which the block reads, is nested too deeply to be copied for it: hand the block the part "
                f"that it needs, by a name of its own, or keep it as an attribute of an object"
            ) from None
    return copies


def changed(originals: Mapping[str, Any], copies: Mapping[str, Any]) -> list[str]:
    """Names whose container is no longer like the original, leaves compared by identity."""
    return [
        name
        for name, original in originals.items()
        if name in copies and original is not copies[name] and _differs(original, copies[name])
    ]


def _differs(original: Any, copy: Any) -> bool:
    try:
        return not _same(original, copy, set())
    except RecursionError:  # the copy was made, so it has become deeper since
        return True


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind not in _KINDS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is not dict and _KINDS.isdisjoint(map(type, value)):  # a prompt, say, of any length
        return memo.setdefault(id(value), value if kind is tuple else value.copy())
    if kind is list:
        memo[id(value)] = copy = []
        copy.extend(_copy(item, memo) for item in value)
        return copy
    if kind is dict:
        memo[id(value)] = copy = {}
        copy.update((key, _copy(item, memo)) for key, item in value.items())
        return copy
    if kind is set:  # of tuples, say
        memo[id(value)] = copy = set(value)
        return copy
    copy = tuple(_copy(item, memo) for item in value)
    if all(new is old for new, old in zip(copy, value, strict=True)):
        copy = value
    return memo.setdefault(id(value), copy)


def _same(original: Any, copy: Any, seen: set[tuple[int, int]]) -> bool:
    if original is copy:
        return True
    kind = type(original)
    if kind is not type(copy) or kind not in _KINDS or len(original) != len(copy):
        return False
    pair = (id(original), id(copy))
    if pair in seen:
        return True
    seen.add(pair)
    if kind is dict:
        return all(
            old_key is new_key and _same(old, new, seen)
            for (old_key, old), (new_key, new) in zip(original.items(), copy.items(), strict=True)
        )
    if kind is not set and kind is not dict and all(map(is_, original, copy)):
        return True
    if kind is set:
        return {id(item) for item in original} == {id(item) for item in copy}
    return all(_same(old, new, seen) for old, new in zip(original, copy, strict=True))
