"""What a block does, written down once for all requests beside which it does the same.

The block is run with names in place of values, before the forward. What it does with them is noted as steps; what
would depend on values, or leave anything behind outside the block, has no rule and ends the attempt: each request
then runs the block for itself. So nothing that a block may call is ever called here but what this file knows.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from insitu.run.heads import ATTN_PATTERN
from insitu.run.held import Held, NotStraightError, Shown, bare, codes, require_known
from insitu.run.served import Rows, storage_of
from insitu.tree import LOGITS, SAMPLES, Place


@dataclass(frozen=True)
class ByRows:
    """A tensor that goes by tokens, or by ``each`` request without an axis for tokens, as a request sees it."""

    dims: int
    each: bool = False


@dataclass(frozen=True)
class Step:
    """``result = what(*args)``, of numbers of earlier results (``Sym``) and constants. ``line``: of the user's code."""

    what: str
    args: tuple[Any, ...]
    result: Sym | None
    line: tuple[CodeType, int]


@dataclass
class Program:
    """Steps, and what is left in the end: what is to come home, by name, or what the function returned."""

    steps: list[Step] = field(default_factory=list)
    saves: Mapping[str, Any] = field(default_factory=dict)
    returned: Any = None
    lost: Sequence[Any] = ()
    refused: bool = False


class Sym:
    """Stands for a value. ``kind``: ``ByRows``, or a tuple, list or dict of kinds, as a place was seen to hold.

    ``span``: which of the request's rows it has, if not all. ``base``, ``key``: what it is a part of.
    """

    __slots__ = ("__weakref__", "_base", "_captured", "_key", "_kind", "_place", "_recording", "_span")

    def __init__(self, recording: Recording, kind: Any, place: Place | None, span: Any = None) -> None:
        self._recording = recording
        self._kind = kind
        self._place = place
        self._span = span
        self._captured = False
        self._base: Sym | None = None
        self._key: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _METHODS or not isinstance(self._kind, ByRows):
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
            return self
        if kind.each or self._span is not None or not recording.fits(key, self._place):
            raise recording.refused()
        one = type(key) is int
        part = recording.note(
            "rows", (self, key), ByRows(kind.dims - one, one), self._place, None if one else repr(key)
        )
        part._base, part._key = self, key
        return part

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is self and _is_all(key):
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

    def _refuse(self, *_: Any) -> Any:
        raise self._recording.refused()

    __bool__ = __contains__ = __float__ = __int__ = __index__ = __call__ = __delitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = __str__ = __format__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__

    # -- arithmetic -----------------------------------------------------------------------

    def __neg__(self) -> Any:
        if not isinstance(self._kind, ByRows):
            raise self._recording.refused()
        return self._recording.note("neg", (self,), self._kind, self._place, self._span)


def _binary(name: str, reflected: bool = False) -> Callable[[Sym, Any], Any]:
    def apply(self: Sym, other: Any) -> Any:
        left, right = (other, self) if reflected else (self, other)
        kind, span = self._recording.together(left, right)
        by_rows = [each for each in (left, right) if isinstance(each, Sym) and each._kind.each == kind.each]
        place = next((each._place for each in by_rows if each._place is not None), None)
        return self._recording.note(name, (bare(left), bare(right)), kind, place, span)

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


@dataclass(frozen=True)
class Constant:
    """A part of a place's value that is no tensor."""

    value: Any


class Recording:
    """The session of a block that is written down. ``kind_of``: what a place was seen to hold; ``place_of``: where a
    standard name lies; ``shortest``: tokens of the shortest prompt."""

    def __init__(
        self,
        owner: object,
        kind_of: Callable[[Place], Any],
        place_of: Callable[[str, int | None], Place],
        shortest: int,
    ) -> None:
        self.owner = owner
        self.program = Program()
        self._kind_of = kind_of
        self._place_of = place_of
        self._shortest = shortest
        self._parts: list[Sym] = []

    def refused(self) -> NotStraightError:
        self.program.refused = True
        return NotStraightError()

    def __getattr__(self, name: str) -> Any:
        raise self.refused()

    # -- the session ----------------------------------------------------------------------

    def read(self, place: Place) -> Any:
        if place.op or not (place.in_forward or place in (LOGITS, SAMPLES)):
            raise self.refused()
        return self.note("read", (place,), self._kind_of(place), place)

    def write(self, place: Place, value: Any) -> None:
        if place == SAMPLES:
            raise self.refused()
        self._require_whole(value, self._kind_of(place))
        self.note("write", (place, value), None, place)

    def read_stream(self, name: str, layer: int | None) -> Any:
        return self.note("stream", (name, layer), self._stream_kind(name, layer), self._place_of(name, layer))

    def write_stream(self, name: str, layer: int | None, value: Any) -> None:
        self._require_whole(value, self._stream_kind(name, layer))
        place = self._place_of(name, layer)
        if any(part._place == place for part in self._parts):
            raise self.refused()  # what it is a part of may change
        self.note("write_stream", (name, layer, value), None, place)

    def _stream_kind(self, name: str, layer: int | None) -> ByRows:
        if name == ATTN_PATTERN:
            raise self.refused()
        kinds = leaves(self._kind_of(self._place_of(name, layer)))
        if not kinds:
            raise self.refused()
        return ByRows(3 if name in ("q", "k", "v") else 2)

    def _require_whole(self, value: Any, kind: Any) -> None:
        if not isinstance(value, Sym) or value._kind != kind or value._span is not None or value._captured:
            raise self.refused()

    # -- steps ----------------------------------------------------------------------------

    def note(self, what: str, args: tuple[Any, ...], kind: Any, place: Place | None, span: Any = None) -> Any:
        if kind is None and what in ("read", "part"):
            raise self.refused()  # never seen, or no tensor that goes by tokens
        result = None if what in _EFFECTS else Sym(self, kind, place, span)
        if what in _METHODS or what == "rows":
            if args[0]._captured:
                raise self.refused()
            if what != "clone" and result is not None:
                self._parts.append(result)
        if len(self.program.steps) == MOST:
            raise self.refused()
        self.program.steps.append(Step(what, args, result, _line(sys._getframe(1))))
        return result

    def edit(self, target: Sym, what: str, value: Any) -> None:
        """``target`` changed in place. Other parts of the same memory would change with it, so there may be none."""
        if not isinstance(target._kind, ByRows) or target._captured:
            raise self.refused()
        if any(part._place == target._place and (part is not target or part._base is None) for part in self._parts):
            raise self.refused()
        if self.together(target, value) != (target._kind, target._span):
            raise self.refused()
        if target._place == SAMPLES:
            raise self.refused()
        self.note("edit", (target, what, bare(value)), target._kind, target._place)

    def fits(self, key: Any, place: Place | None) -> bool:
        """Whether it picks rows, and does so of the shortest prompt too."""
        if type(key) is int:
            shortest = 1 if place in _ONE_ROW else self._shortest
            return -shortest <= key < shortest
        if isinstance(key, slice):
            forward = key.step is None or (type(key.step) is int and key.step > 0)
            return forward and all(part is None or type(part) is int for part in (key.start, key.stop))
        return False

    def together(self, left: Any, right: Any) -> tuple[ByRows, Any]:
        """What an operation on the two gives, and its span; refused if it does not do the same to rows packed
        together."""
        kinds = [value._kind for value in (left, right) if isinstance(value, Sym)]
        if not all(isinstance(kind, ByRows) for kind in kinds):
            raise self.refused()
        whole = max(kinds, key=lambda kind: (not kind.each, kind.dims))
        for value in (left, right):
            if isinstance(value, Sym):
                kind = value._kind
                if (kind.each and kind.dims < 1) or (kind != whole and not (kind.each and kind.dims < whole.dims)):
                    raise self.refused()
            elif isinstance(value, Held):
                if value.tensor.dim() > whole.dims - (not whole.each):
                    raise self.refused()
            elif type(value) not in (int, float, bool):
                raise self.refused()
        rows = [value for value in (left, right) if isinstance(value, Sym) and not value._kind.each]
        spans = {(value._span, value._place in _ONE_ROW) for value in rows}
        if len(spans) > 1:
            raise self.refused()
        return whole, rows[0]._span if rows else None


MOST = 100_000
"""Steps. Alone, a loop without end may end at a place that has gone by."""
_EFFECTS = {"write", "write_stream", "edit"}
_ONE_ROW = (LOGITS, SAMPLES)
_METHODS = {"clone", "detach", "float", "cpu", "contiguous"}
_PLAIN = (int, float, bool, str, type(None), slice, range, torch.dtype)
BUILTINS = {
    "range": range, "len": len, "enumerate": enumerate, "zip": zip, "list": list, "tuple": tuple, "dict": dict,
    "reversed": reversed, "int": int, "min": min, "max": max,
}  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text and the like, which is the same for all whoever holds it."""
    return type(value) in _PLAIN


def shown(value: Any, known: Callable[[Any], bool]) -> Any:
    """What a block that is written down sees of one of its caller's values; ``known`` says which objects answer for
    themselves there."""
    if is_plain(value) or known(value):
        return value
    if type(value) in (list, tuple) and all(is_plain(part) or known(part) for part in value):
        return Shown(value) if type(value) is list else value
    if type(value) is torch.Tensor and not value.requires_grad and value.layout is torch.strided and not value.is_meta:
        return Held(value)
    raise NotStraightError


def captured(recording: Recording, value: torch.Tensor) -> Sym:
    """A tensor of the caller's that is another one for each request."""
    sym = Sym(recording, ByRows(value.dim(), each=True), None)
    sym._captured = True
    return sym


def with_values(function: FunctionType, show: Callable[[Any], Any]) -> FunctionType:
    """The function, with what it closes over and the globals that it names as ``show`` shows them."""
    code = function.__code__
    require_known(code, code.co_freevars)
    cells = [CellType(show(cell.cell_contents)) for cell in function.__closure__ or ()]
    names = {name for each in codes(code) for name in each.co_names if name in function.__globals__}
    namespace = {"__builtins__": BUILTINS, **{name: show(function.__globals__[name]) for name in names}}
    if function.__kwdefaults__ or function.__defaults__:
        raise NotStraightError
    return FunctionType(code, namespace, function.__name__, None, tuple(cells))


def _is_all(key: Any) -> bool:
    return key is Ellipsis or (isinstance(key, slice) and key == slice(None))


def leaves(kind: Any) -> list[Any]:
    """The kinds of the tensors in a value; None for one that does not go by tokens."""
    if isinstance(kind, Constant):
        return []
    if isinstance(kind, ByRows) or kind is None:
        return [kind]
    return [leaf for part in (kind.values() if isinstance(kind, dict) else kind) for leaf in leaves(part)]


def kind_of(value: Any, rows: Rows, fixed: frozenset[int]) -> Any:
    """What a place's value is like, of which a request has these rows; ``fixed`` as for ``Served``."""
    if isinstance(value, torch.Tensor):
        return None if storage_of(value) in fixed or rows.of(value) is None else ByRows(value.dim())
    if type(value) in (tuple, list):
        return type(value)(kind_of(part, rows, fixed) for part in value)
    if type(value) is dict:
        return {key: kind_of(part, rows, fixed) for key, part in value.items()}
    return Constant(value) if is_plain(value) else None


def can_come_home(value: Any, seen: set[int]) -> bool:
    """Whether what a block leaves is made of values by name, numbers, and lists and the like, each there once."""
    if isinstance(value, Sym):
        return value._captured is False and None not in leaves(value._kind)
    if type(value) not in (list, tuple, dict):
        return is_plain(value)
    if id(value) in seen and value:
        return False
    seen.add(id(value))
    if type(value) is dict and not all(map(is_plain, value)):
        return False
    return all(can_come_home(part, seen) for part in (value.values() if type(value) is dict else value))


def _line(frame: FrameType | None) -> tuple[CodeType, int]:
    """The user's line that the step is on."""
    while frame is not None and frame.f_globals.get("__builtins__") is not BUILTINS and frame.f_back is not None:
        frame = frame.f_back
    assert frame is not None
    return frame.f_code, frame.f_lineno


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "neg": operator.neg,
}  # fmt: skip
