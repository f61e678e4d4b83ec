"""Operators of a restricted block: Python's own, once it is known how large what they make will be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from insitu.guard.data import is_data
from insitu.guard.errors import NotAllowedError
from insitu.guard.meter import Meter

__all__ = ["Operators", "walked"]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "//": operator.floordiv,
    "@": operator.matmul,
}
_INPLACE: dict[str, Callable[[Any, Any], Any]] = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "%=": operator.imod,
    "**=": operator.ipow,
    "<<=": operator.ilshift,
    ">>=": operator.irshift,
    "|=": operator.ior,
    "^=": operator.ixor,
    "&=": operator.iand,
    "//=": operator.ifloordiv,
    "@=": operator.imatmul,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}
_UNARY: dict[str, Callable[[Any], Any]] = {"+": operator.pos, "-": operator.neg, "~": operator.invert}
_SEQUENCES = (str, bytes, list, tuple)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEEPEST = 200
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}


class Operators:
    """Of one run."""

    def __init__(self, meter: Meter, iterable: Callable[[Any], Iterator[Any]]) -> None:
        self._meter = meter
        self._iterable = iterable

    def binary(self, symbol: str, a: Any, b: Any) -> Any:
        self._meter.tick()
        self._check(symbol, a, b)
        return _BINARY[symbol](a, b)

    def inplace(self, symbol: str, a: Any, b: Any) -> Any:
        self._meter.tick()
        if symbol == "+=" and type(a) is list:
            b = list(self._iterable(b))
            self._meter.items(len(a) + len(b))
        else:
            self._check(symbol[:-1], a, b)
        return _INPLACE[symbol](a, b)

    def unary(self, symbol: str, a: Any) -> Any:
        self._meter.tick()
        self._require_operand(a)
        return _UNARY[symbol](a)

    def compare(self, symbol: str, a: Any, b: Any) -> Any:
        self._meter.tick()
        by_hash = symbol in ("in", "not in") and isinstance(b, (set, frozenset, dict))
        for side in (a,) if by_hash else (a, b):
            if isinstance(side, _CONTAINERS):
                self.walk(side)
        if symbol in ("in", "not in") and not isinstance(b, (*_CONTAINERS, str, bytes, range, torch.Tensor)):
            b = self._iterable(b)
        return _COMPARE[symbol](a, b)

    def walk(self, value: Any) -> None:
        """Counts all that an operation may come to in containers, each as often as it is met."""
        if isinstance(value, (list, tuple, set, frozenset)) and (kinds := set(map(type, value))) <= _SCALARS:
            texts = sum(len(part) for part in value if type(part) in (str, bytes)) if kinds & {str, bytes} else 0
            self._meter.tick(1 + len(value) // 64 + texts // 4096)
            return
        for part in walked(value):
            if isinstance(part, BaseException):
                raise NotAllowedError("an exception in a container can't be compared or passed on")
            self._meter.tick(1 + (len(part) // 4096 if isinstance(part, (str, bytes)) else 0))

    def given(self, *values: Any) -> None:
        """Walks what code outside gets, which may write all of it into a message."""
        for value in values:
            if isinstance(value, _CONTAINERS):
                self.walk(value)
            elif isinstance(value, BaseException):
                raise NotAllowedError("an exception is no argument of this")

    def hashable(self, key: Any) -> Any:
        """A key, once it is known that to hash it takes no longer than it looks."""
        if isinstance(key, (tuple, frozenset)):
            self.walk(key)
        elif isinstance(key, (slice, complex)):  # of complex numbers, one can choose the hashes
            raise TypeError(f"a {type(key).__name__} can't be a key")
        elif isinstance(key, int) and key.bit_length() > 64:
            raise NotAllowedError("a key of more than 64 bits: use its text")
        return key

    def _check(self, symbol: str, a: Any, b: Any) -> None:
        self._require_operand(a)
        self._require_operand(b)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return  # each operation of torch's is watched
        if isinstance(a, int) and isinstance(b, int):
            self._check_ints(symbol, a, b)
        elif symbol == "+" and isinstance(a, _SEQUENCES) and isinstance(b, _SEQUENCES):
            self._require_length(a, len(a) + len(b))
        elif symbol == "*" and isinstance(a, _SEQUENCES) and isinstance(b, int):
            self._require_length(a, len(a) * max(b, 0))
        elif symbol == "*" and isinstance(b, _SEQUENCES) and isinstance(a, int):
            self._require_length(b, len(b) * max(a, 0))
        elif symbol == "%" and isinstance(a, (str, bytes)):
            raise NotAllowedError("`%` of a text: write an f-string")
        elif isinstance(a, (set, frozenset, dict)):
            self._meter.items(len(a) + (len(b) if isinstance(b, (set, frozenset, dict)) else 0))

    def _check_ints(self, symbol: str, a: int, b: int) -> None:
        if symbol == "*":
            self._meter.bits(a.bit_length() + b.bit_length())
        elif symbol == "**" and b > 0:
            self._meter.bits(a.bit_length() * b if abs(a) > 1 else 1)
        elif symbol == "<<" and b > 0:
            self._meter.bits(a.bit_length() + b)
        else:
            self._meter.bits(max(a.bit_length(), b.bit_length()))

    def _require_length(self, of: Any, length: int) -> None:
        if isinstance(of, (str, bytes)):
            self._meter.text(length)
        else:
            self._meter.items(length)

    def _require_operand(self, value: Any) -> None:
        if not is_data(value):
            raise NotAllowedError(f"a {type(value).__name__} is no operand in a restricted block")


def walked(value: Any) -> Iterator[Any]:
    """A value, and what is in it if it is a container, at any depth, as often as it is met."""
    pending = [iter((value,))]
    while pending:
        for part in pending[-1]:
            yield part
            if isinstance(part, dict):
                pending.append(iter(part.keys()))
                pending.append(iter(part.values()))
                break
            if isinstance(part, _CONTAINERS):
                pending.append(iter(part))
                break
        else:
            pending.pop()
        if len(pending) > _DEEPEST:
            raise NotAllowedError(f"containers nested more than {_DEEPEST // 2} deep")
