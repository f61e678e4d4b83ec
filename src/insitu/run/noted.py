"""What is written down of a block: steps on values by number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple


class Ref(NamedTuple):
    """A value by its number."""

    number: int


class Noted(NamedTuple):
    """``result = what(*args)``, of numbers of earlier results and constants. ``line``: of the user's code."""

    what: str
    args: tuple[Any, ...]
    result: Ref | None
    line: tuple[CodeType, int]


@dataclass
class Program:
    """Steps, and what is left in the end: what is to come home, by name, or what the function returned.

    ``frees``: the values that the block holds no more when it comes to a step. ``kinds``: those of places, by the
    number of the value that was read there.
    """

    steps: list[Noted] = field(default_factory=list)
    frees: dict[int, list[int]] = field(default_factory=dict)
    kinds: dict[int, Any] = field(default_factory=dict)
    saves: Mapping[str, Any] = field(default_factory=dict)
    returned: Any = None
    lost: Sequence[Any] = ()
    refused: bool = False
    error: Exception | None = None

    @cached_property
    def changes(self) -> Mapping[int, int]:
        """Which values are changed, and the number of the last step that does so."""
        return {
            ref.number: at
            for at, step in enumerate(self.steps)
            if step.what == "edit"
            for ref in refs_in(step.args[:2])
        }

    @cached_property
    def comes_home(self) -> Mapping[int, int]:
        """Which values are left in the end, and the number of the last step that changes them, or -1."""
        return {ref.number: self.changes.get(ref.number, -1) for ref in refs_in((dict(self.saves), self.returned))}

    def can_end_as(self, steps: int, again: Callable[[int], Program | None]) -> bool:
        """Whether requests that end after so many steps can part from it, whose program ``again`` gives."""
        late = (at for at, step in enumerate(self.steps) if step.what == "go_to" and step.args[0] >= steps)
        at = next((at for at in late if self.steps[at].args[1]), None)
        if at is None:
            return True
        other = again(steps)
        return other is not None and other.begins_like(self, at + 1)

    def begins_like(self, other: Program, length: int) -> bool:
        """Whether the first steps are the same, as far as numbers tell."""
        mine, others = ([(each.what, each.result) for each in one.steps[:length]] for one in (self, other))
        return len(mine) == length and mine == others


def mapped(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """``value`` with what is of this kind in its lists, tuples and dicts converted."""
    if type(value) is kind:
        return convert(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(part, kind, convert) for part in value)
    return {key: mapped(part, kind, convert) for key, part in value.items()} if type(value) is dict else value


def refs_in(value: Any) -> list[Ref]:
    """The numbers of values in it."""
    if type(value) is Ref:
        return [value]
    if type(value) in (list, tuple):
        return [ref for part in value for ref in refs_in(part)]
    return [ref for part in value.values() for ref in refs_in(part)] if type(value) is dict else []


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "neg": operator.neg,
}  # fmt: skip
