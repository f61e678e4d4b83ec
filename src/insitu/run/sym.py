"""What stands for a value of a place's while a block is written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from insitu.run.apart import METHODS
from insitu.run.held import LOOKED_AT, USED, Held, NotStraightError, bare, refusing
from insitu.run.kinds import ByRows, Constant, is_plain, leaves
from insitu.run.noted import Ref
from insitu.tree import Place

if TYPE_CHECKING:
    from insitu.run.straight import Recording


def _refuse(sym: Sym, *_: Any) -> Any:
    raise sym._recording.refused()


@refusing(_refuse, *LOOKED_AT, *USED)
class Sym:
    """Stands for a value. ``kind``: ``ByRows``, or a tuple, list or dict of kinds, as a place was seen to hold.

    ``span``: which of the request's rows it has, if not all. ``when``: in which step of its request it was read.
    ``base``, ``key``: what it is a part of. ``shaped``: whether its rows may be of another shape than the place's.
    """

    __slots__ = (
        "__weakref__", "_base", "_captured", "_key", "_kind", "_memory", "_number", "_place", "_recording", "_shaped",
        "_span", "_when",
    )  # fmt: skip

    def __init__(self, recording: Recording, kind: Any, place: Place | None, span: Any = None, when: int = 0) -> None:
        self._recording = recording
        self._number = recording.count()
        self._memory: Any = self._number
        self._when = when
        self._kind = kind
        self._place = place
        self._span = span
        self._captured = False
        self._shaped = False
        self._base: Sym | None = None
        self._key: Any = None

    def __del__(self) -> None:
        self._recording.let_go(self._number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not isinstance(self._kind, ByRows):
            raise self._recording.refused()
        if name in METHODS:
            return lambda *args, **kwargs: self._recording.apart(name, self, args, kwargs)
        if name not in PLAIN_METHODS:
            raise self._recording.refused()
        return lambda: self._recording.note(name, (self,), self._kind, self._place, self._span)

    # -- parts ----------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        recording, kind = self._recording, self._kind
        if isinstance(kind, (tuple, list, dict)):
            part = kind[key]  # as wrong a key as it would be alone
            if isinstance(part, Constant):
                if part.value is not None:  # it may be another one at another visit
                    raise recording.refused()
                return None
            return recording.note("part", (self, key), part, self._place)
        if _is_all(key):
            self._recording.copied[self._number] += 1
            return self
        if type(key) is tuple and (key == (Ellipsis, None) or (kind.dims == 1 and key == (slice(None), None))):
            return self.unsqueeze(-1)
        if kind.each or self._span is not None or not recording.fits(key, self):
            raise recording.refused()
        one = type(key) is int
        span = (key.start, key.stop, key.step or 1) if isinstance(key, slice) else None
        part = recording.note("rows", (self, key), ByRows(kind.dims - one, one, kind.like), self._place, span)
        part._base, part._key = self, key
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is self and _is_all(key):
            self._recording.copied[self._number] -= 1
            return  # the end of `x[:] += y`
        if isinstance(value, Sym) and value._base is self and type(value._key) is type(key) and value._key == key:
            return  # that of `x[-1] += y`
        if not isinstance(self._kind, ByRows):
            raise self._recording.refused()
        target = self if _is_all(key) else self[key]
        self._recording.edit(target, "copy", value)

    def __iter__(self) -> Any:
        return iter([self[index] for index in range(len(self))])

    def __len__(self) -> int:
        if not isinstance(self._kind, (tuple, list)):
            raise self._recording.refused()
        return len(self._kind)

    # -- arithmetic -----------------------------------------------------------------------

    def __neg__(self) -> Any:
        if not isinstance(self._kind, ByRows):
            raise self._recording.refused()
        return self._recording.note("neg", (self,), self._kind, self._place, self._span)

    def __matmul__(self, other: Any) -> Any:
        if not isinstance(self._kind, ByRows) or type(other) not in (Held, Sym):
            raise self._recording.refused()
        if type(other) is Sym:
            return self._recording.product(self, other)
        return self._recording.apart("matmul", self, (other.tensor,), {})

    def __rmatmul__(self, other: Any) -> Any:
        raise self._recording.refused()


def _binary(name: str, reflected: bool = False) -> Callable[[Sym, Any], Any]:
    def apply(self: Sym, other: Any) -> Any:
        left, right = (other, self) if reflected else (self, other)
        kind, span = self._recording.together(left, right)
        by_rows = [each for each in (left, right) if isinstance(each, Sym) and each._kind.each == kind.each]
        first = next((each for each in by_rows if each._place is not None), by_rows[0])
        return self._recording.note(name, (bare(left), bare(right)), kind, first._place, span, first._when)

    return apply


def _in_place(name: str) -> Callable[[Sym, Any], Any]:
    def apply(self: Sym, other: Any) -> Any:
        self._recording.edit(self, name, other)
        return self

    return apply


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Sym, f"__{_name}__", _binary(_name))
    setattr(Sym, f"__r{_name}__", _binary(_name, reflected=True))
    setattr(Sym, f"__i{_name}__", _in_place(_name))


class Torch:
    """The module ``torch``: its types, and those functions that are methods of a value."""

    def __getattr__(self, name: str) -> Any:
        if isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name not in METHODS:
            raise NotStraightError
        return lambda value, *args, **kwargs: getattr(self._own(value), name)(*args, **kwargs)

    def matmul(self, value: Any, other: Any) -> Any:
        return self._own(value) @ other

    def outer(self, value: Any, other: Any) -> Any:
        own = self._own(value)
        if own._kind != ByRows(1) or (other._kind if type(other) is Sym else None) not in (None, ByRows(1, each=True)):
            raise NotStraightError
        return own.unsqueeze(-1) * other

    def _own(self, value: Any) -> Any:
        if type(value) is not Sym:
            raise NotStraightError
        return value


PLAIN_METHODS = {"clone", "detach", "float", "cpu", "contiguous"}
"""Methods that do to packed rows what they do to each."""


def ref_of(sym: Sym) -> Ref:
    return Ref(sym._number)


def captured(recording: Recording, value: torch.Tensor) -> Sym:
    """A tensor of the caller's that is another one for each request."""
    sym = Sym(recording, ByRows(value.dim(), each=True), None)
    sym._captured = True
    return sym


_LEFT = -(2**31)


def _is_all(key: Any) -> bool:
    return key is Ellipsis or (isinstance(key, slice) and key == slice(None))


def can_come_home(value: Any, seen: set[int], copied: Counter[int]) -> bool:
    """Whether what a block leaves is made of values by name, numbers, and lists and the like, each there once.
    ``copied``: by number, how often a value may be a tensor of its own (`x[:]`), and not itself."""
    if isinstance(value, Sym):
        if copied[value._number] > 0:
            copied[value._number] = _LEFT
        elif copied[value._number] == _LEFT:
            return False
        return value._captured is False and None not in leaves(value._kind)
    if type(value) not in (list, tuple, dict):
        return is_plain(value)
    if id(value) in seen and value:
        return False
    seen.add(id(value))
    if type(value) is dict and not all(map(is_plain, value)):
        return False
    return all(can_come_home(part, seen, copied) for part in (value.values() if type(value) is dict else value))
