"""Runs what was written down of a block beside many requests at once, on their rows packed together.

Only what gives each request the very bits that it would get alone is done to packed rows: picking rows, copying,
adding, subtracting, multiplying and dividing. What comes home is taken apart once, each request's in memory of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import CodeType
from typing import Any

import torch

from insitu.block import EngineError
from insitu.run.straight import OPERATIONS, Constant, Program, Step, Sym
from insitu.tree import LOGITS, SAMPLES, current

_OTHER = "a place's value is of another kind than it was before: trace again"


class OtherKindError(EngineError):
    """A place's value is not like those that were seen there."""


class Packed:
    """Rows of all requests one after another, ``counts`` of each; None: one row for each, without an axis for it."""

    __slots__ = ("counts", "tensor")

    def __init__(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> None:
        self.tensor = tensor
        self.counts = counts

    def apart(self) -> list[Any]:
        copies: Any = torch.unbind_copy if self.counts is None else torch.split_with_sizes_copy
        return list(copies(self.tensor) if self.counts is None else copies(self.tensor, list(self.counts)))


class Together:
    """A program beside requests. Called as a block is, in a run of its own whose rows are those of all; ``counts``
    says how many each of the requests has, in the order of the batch. ``values`` are those of captured tensors,
    one for each request, in the same order."""

    def __init__(self, program: Program, values: Mapping[Sym, Sequence[torch.Tensor]], text: Any) -> None:
        self._program = program
        self._values = values
        self._text = text
        self._known: dict[int, Any] = {}
        self._step: Step | None = None
        self.counts: Sequence[int] = ()
        self.order: Sequence[int] = ()
        self.failed: BaseException | None = None
        self._saves: dict[str, Any] = {}
        self._returned: Any = None
        self._parts: list[list[Any]] = []

    def text(self) -> Any:
        return self._text

    def __call__(self) -> None:
        for step in self._program.steps:
            self._step = step
            value = self._done(step)
            if step.result is not None:
                self._known[id(step.result)] = value
        self._step = None
        parts: dict[int, list[Any]] = {}
        self._saves = {name: self._home(value, parts) for name, value in self._program.saves.items()}
        self._returned = self._home(self._program.returned, parts)
        self._known.clear()
        self._parts = list(parts.values())

    # -- steps ----------------------------------------------------------------------------

    def _done(self, step: Step) -> Any:
        session: Any = current.get()
        match step.what, step.args:
            case "read", (place,):
                value, counts = session.read(place), self.counts
                assert step.result is not None
                return _packed(value, [1] * len(counts) if place in (LOGITS, SAMPLES) else counts, step.result._kind)
            case "stream", (name, layer):
                return Packed(session.read_stream(name, layer), self.counts)
            case "write", (place, value):
                session.write(place, _bare(self._of(value)))
            case "write_stream", (name, layer, value):
                session.write_stream(name, layer, _bare(self._of(value)))
            case "part", (value, key):
                return self._of(value)[key]
            case "rows", (value, key):
                return self._rows(self._of(value), key)
            case "edit", (target, what, value):
                self._edit(target, what, value)
            case "neg", (value,):
                return Packed(-self._of(value).tensor, self._of(value).counts)
            case name, (value,):
                packed = self._of(value)
                return Packed(getattr(packed.tensor, name)(), packed.counts)
            case name, (left, right):
                return self._binary(OPERATIONS[name], left, right)
        return None

    def _of(self, value: Any) -> Any:
        if not isinstance(value, Sym):
            return value
        if id(value) not in self._known:
            mine = self._values[value]
            self._known[id(value)] = Packed(torch.stack([mine[index] for index in self.order]), None)
        return self._known[id(value)]

    def _index(self, counts: Sequence[int], key: int | slice) -> tuple[list[int], list[int] | None]:
        """Which packed rows ``key`` means in each request, and how many."""
        starts = [0, *accumulate(counts)]
        if isinstance(key, int):
            return [start + key % count for start, count in zip(starts, counts, strict=False)], None
        found = [range(count)[key] for count in counts]
        rows = [start + row for start, part in zip(starts, found, strict=False) for row in part]
        return rows, [len(part) for part in found]

    def _rows(self, packed: Packed, key: int | slice) -> Packed:
        assert packed.counts is not None
        rows, counts = self._index(packed.counts, key)
        return Packed(packed.tensor[torch.tensor(rows, dtype=torch.long, device=packed.tensor.device)], counts)

    def _binary(self, function: Callable[..., Any], left: Any, right: Any) -> Packed:
        left, right = self._of(left), self._of(right)
        packed = [value for value in (left, right) if isinstance(value, Packed)]
        whole = max(packed, key=lambda value: (value.counts is not None, value.tensor.dim()))
        return Packed(function(_beside(whole, left), _beside(whole, right)), whole.counts)

    def _edit(self, target: Sym, what: str, value: Any) -> None:
        packed, value = self._of(target), self._of(value)
        value = _beside(packed, value)
        _changed(packed.tensor, what, value)
        if target._base is not None:  # of those that picking rows has copied
            base = self._of(target._base)
            rows, _ = self._index(base.counts, target._key)
            base.tensor[torch.tensor(rows, dtype=torch.long, device=base.tensor.device)] = packed.tensor

    def _failed_alone(self, number: int) -> None:
        """Once more what has failed, on the rows of one request: the message may give a shape."""

        def own(value: Any) -> Any:
            value = self._of(value)
            return value.apart()[number] if isinstance(value, Packed) else value

        match self._step and (self._step.what, self._step.args):
            case "edit", (target, what, value):
                _changed(own(target), what, own(value))
            case name, (left, right) if name in OPERATIONS:
                OPERATIONS[name](own(left), own(right))

    # -- what comes home ------------------------------------------------------------------

    def _home(self, value: Any, parts: dict[int, list[Any]]) -> Any:
        """The value with each tensor in it taken apart."""

        def apart(packed: Packed) -> _Each:
            if id(packed.tensor) not in parts:
                parts[id(packed.tensor)] = Packed(packed.tensor.cpu(), packed.counts).apart()
            return _Each(parts[id(packed.tensor)])

        return _mapped(value, Sym, lambda sym: _mapped(self._of(sym), Packed, apart))

    def saves(self, number: int) -> dict[str, Any]:
        """What the request has saved; ``number``: its place in the batch, among these."""
        return {name: _picked(value, number) for name, value in self._saves.items()}

    def release(self, number: int) -> None:
        """What the request has left is taken: nothing holds it here."""
        for each in self._parts:
            each[number] = None

    def returned(self, number: int) -> Any:
        return _picked(self._returned, number)

    def error_like(self, error: BaseException, number: int) -> BaseException:
        """The error on the user's line, once more for one of the requests."""
        try:
            self._failed_alone(number)
        except Exception as alone:
            error = alone if type(alone) is type(error) else error
        try:
            own = copy.copy(error)
        except Exception:
            own = error
        if self._step is None:
            return own
        code, line = self._step.line
        return raised_at(own, code, line)


class _Each:
    """One tensor for each request."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = tensors


def _mapped(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """``value`` with what is of this kind in its lists, tuples and dicts converted."""
    if type(value) is kind:
        return convert(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, kind, convert) for part in value)
    return {key: _mapped(part, kind, convert) for key, part in value.items()} if type(value) is dict else value


def _picked(value: Any, number: int) -> Any:
    return _mapped(value, _Each, lambda each: each.tensors[number])


def _packed(value: Any, counts: Sequence[int], kind: Any) -> Any:
    if isinstance(kind, Constant):
        if (value is None) is not (kind.value is None):
            raise OtherKindError(_OTHER)
        return value
    if isinstance(value, torch.Tensor):
        if kind is not None and (value.dim() != kind.dims or value.shape[0] != sum(counts)):
            raise OtherKindError(_OTHER)
        return Packed(value, counts)
    if isinstance(value, (tuple, list)):
        return type(value)(_packed(part, counts, kind[i]) for i, part in enumerate(value))
    if isinstance(value, dict):
        return {key: _packed(part, counts, kind[key]) for key, part in value.items()}
    return value


def _bare(value: Any) -> Any:
    return _mapped(value, Packed, lambda packed: packed.tensor)


def _beside(whole: Packed, value: Any) -> Any:
    """The value such that an operation with the packed rows does to each what it would do alone."""
    if not isinstance(value, Packed):
        return value
    tensor = value.tensor
    missing = whole.tensor.dim() - tensor.dim()
    if value.counts is None and whole.counts is not None:
        # A request's own tensor has no axis for its rows.
        counts = torch.tensor(whole.counts, device=tensor.device)
        tensor = tensor.repeat_interleave(counts, 0, output_size=whole.tensor.shape[0])
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:]) if missing else tensor


def _changed(tensor: torch.Tensor, what: str, value: Any) -> None:
    if what == "copy":
        tensor[...] = value
    else:
        getattr(tensor, f"__i{what}__")(value)


def raised_at(error: BaseException, code: CodeType, line: int) -> BaseException:
    """The error as raised on a line of the user's."""
    place = compile("\n" * (line - 1) + "raise error", code.co_filename, "exec").replace(co_name=code.co_name)
    try:
        exec(place, {"error": error.with_traceback(None)})
    except BaseException as raised:
        if raised.__traceback__ is not None:
            raised.__traceback__ = raised.__traceback__.tb_next
        return raised
    return error
