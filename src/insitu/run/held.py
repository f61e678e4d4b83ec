"""What a block that is written down may see of its caller's values, and which code can be written down at all.

It can read them and calculate with them; what would change one, or tell that it is another object than it would be
alone, has no rule.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class NotStraightError(BaseException):
    """A step without a rule. No ``Exception``, which a block might catch."""


def _refuse(*_: Any) -> Any:
    raise NotStraightError


def refusing(refuse: Callable[..., Any], *names: str) -> Callable[[type[T]], type[T]]:
    """Gives a class the methods of these names, each of which is ``refuse``."""

    def to(made: type[T]) -> type[T]:
        for name in names:
            setattr(made, f"__{name}__", refuse)
        return made

    return to


LOOKED_AT = ("eq", "ne", "lt", "le", "gt", "ge", "repr", "str", "format")
USED = ("bool", "contains", "float", "int", "index", "call", "delitem")


@refusing(_refuse, *LOOKED_AT)
class _Read:
    """Equal to nothing, and never shown as a text."""

    __slots__ = ()


class Shown(_Read):
    """A list of the caller's, to be read only."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __contains__(self, value: Any) -> bool:
        return value in self._parts

    def __getitem__(self, key: Any) -> Any:
        return _refuse() if isinstance(key, slice) else self._parts[key]


@refusing(_refuse, *USED, "setitem", "iadd", "isub", "imul", "itruediv")
class Held(_Read):
    """A tensor of the caller's, or what was calculated from it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS:
            return getattr(self.tensor, name)
        return (lambda: Held(getattr(self.tensor, name)())) if name in _METHODS else _refuse()

    def __getitem__(self, key: Any) -> Held:
        return Held(self.tensor[key]) if all(map(_is_index, key if type(key) is tuple else (key,))) else _refuse()

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Held]:
        return map(Held, iter(self.tensor))

    def __neg__(self) -> Held:
        return Held(-self.tensor)


def _binary(function: Callable[[Any, Any], Any], reflected: bool = False) -> Callable[[Held, Any], Any]:
    def apply(self: Held, other: Any) -> Any:
        if type(other) not in (int, float, bool, Held):
            return NotImplemented  # a place's value has the rule
        left, right = (other, self) if reflected else (self, other)
        return Held(function(bare(left), bare(right)))

    return apply


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Held, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(Held, f"__r{_name}__", _binary(getattr(operator, _name), reflected=True))

_FACTS = {"shape", "ndim", "dtype"}
_METHODS = {"clone", "detach", "float", "cpu", "contiguous", "norm", "mean", "sum"}


def _is_index(key: Any) -> bool:
    return type(key) in (int, slice, type(None), type(Ellipsis))


def bare(value: Any) -> Any:
    return value.tensor if type(value) is Held else value


def codes(code: CodeType) -> list[CodeType]:
    """The code and all that is written in it."""
    return [code, *(each for part in code.co_consts if isinstance(part, CodeType) for each in codes(part))]


@lru_cache(maxsize=1024)
def global_names(code: CodeType) -> frozenset[str]:
    """What the code, and all that is written in it, reads of its globals; attributes are none."""
    return frozenset(
        str(one.argval) for each in codes(code) for one in dis.get_instructions(each) if one.opname == "LOAD_GLOBAL"
    )


@lru_cache(maxsize=1024)
def _is_known(code: CodeType, outside: Collection[str]) -> bool:
    return all(map(_is_plain_code, codes(code), [outside] * len(codes(code))))


def require_known(code: CodeType, outside: tuple[str, ...] = ()) -> None:
    """Raises ``NotStraightError`` for code that could go on where a rule is missing (``except``, ``with``), tells what
    kind of object it has (``match``, ``is``), or binds names of its caller's: ``outside``, or globals."""
    if not _is_known(code, outside):
        raise NotStraightError


def _is_plain_code(code: CodeType, outside: Collection[str]) -> bool:
    before = None
    for one in dis.get_instructions(code):
        name = one.opname
        if name in _UNKNOWN or name.startswith(("MATCH_", "SETUP_")):
            return False
        if name in ("STORE_DEREF", "DELETE_DEREF") and one.argval in outside:
            return False
        if name == "IS_OP" and not (before is not None and before.opname == "LOAD_CONST" and before.argval is None):
            return False
        if ("_ATTR" in name or "_METHOD" in name) and str(one.argval).startswith(("_", "format")):
            return False
        before = one
    return True


_UNKNOWN = {"PUSH_EXC_INFO", "BEFORE_WITH", "BEFORE_ASYNC_WITH", "STORE_GLOBAL", "DELETE_GLOBAL"}
