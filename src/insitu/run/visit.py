"""One place in a step that is looked through before its forward: what tables are to do there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from insitu.run.affine import Affine, AffineOfMany, as_row
from insitu.run.expression import Expression, Operand, Row, made_of, product
from insitu.run.noted import OPERATIONS, Noted
from insitu.run.packed import Packed
from insitu.run.promised import Promisable
from insitu.run.served import Rows
from insitu.run.stream import Stream
from insitu.run.structure import tensors_in
from insitu.tree import Place


class TableEdit:
    """What a table does at one place in the rows of many requests: to the tensor ``number`` of the place, or to the
    sum of all, the ``stream``."""

    __slots__ = ("edits", "number", "stream")

    def __init__(self, part: int, stream: Stream | None, edits: AffineOfMany) -> None:
        self.number = part
        self.stream = stream
        self.edits = edits

    def is_like(self, other: TableEdit) -> bool:
        return (self.number, self.stream) == (other.number, other.stream) and self.edits.is_like(other.edits)

    def apply(self, live: Any, rows: Rows) -> list[torch.Tensor]:
        """Does the same in the live value. Returns those of its tensors that it may have changed."""
        parts = [tensors_in(live).floating[self.number]] if self.stream is None else self.stream.parts(live)
        index = rows.of(parts[0])
        first, *others = [part[index] for part in parts]
        value = sum(others, first).clone()
        self.edits.apply(value)
        parts[0][index] = value
        for other in parts[1:]:
            other[index] = 0
        return parts


class Made:
    """``value`` is what the step ``at`` makes of a visit's, which had so many ``edits`` then, and ``of`` which others.
    ``used``: it is more than what the place is edited by."""

    def __init__(self, visit: Visit, value: Expression, at: int, edits: int, of: Sequence[int]) -> None:
        self.visit = visit
        self.value = value
        self.at = at
        self.edits = edits
        self.of = of
        self.used = False


class Visit:
    """One place in the step. ``used``: something is done with its value, which may not be edited any more then."""

    def __init__(self, place: Place, known: Promisable | None, count: int) -> None:
        self.place = place
        self.used = False
        self.edits: Affine | None = None
        self.ways: set[bool] = set()
        """Whether it was read as the sum of its tensors, and whether by themselves: of both, what is edited one way is
        not to show in what was read the other way before."""
        self.count = 0
        """How often it was edited."""
        self._known = known
        self._members = count
        self._target: Any = None

    def which(self, stream: Stream | None) -> Any:
        """Which of the place's tensors a table would edit, None if it can't."""
        if self._known is None:
            return None
        count = len(self._known.like)
        if stream is None:
            return self._known.structure.filled(range(count), [None] * self._known.structure.shape[1])
        if type(stream) is not Stream or stream.multiplier != 1 or stream.count != count:
            return None
        return 0 if count == 1 else stream

    def take(self, which: Any, what: str, value: Any) -> bool:
        """Notes an edit; False if it can't be."""
        if self._known is None or self.used or self._target not in (None, which) or len(self.ways) > 1:
            return False
        if not isinstance(which, (int, Stream)):
            return False
        if not isinstance(value, Row):
            value = self.row_of(value, anywhere=what == "copy")
        if value is None:
            return False
        edits = Affine(self.edits)
        match what, value:
            case "copy", Row():
                edits.become(value.affine)
            case "add" | "sub", Row():
                if not edits.plus(value.affine, 1.0 if what == "add" else -1.0):
                    return False
            case _, Row():
                return False
            case "copy", _:
                edits.set(value)
            case "add", _:
                edits.add(value)
            case "sub", _:
                edits.add(value, -1.0)
            case "mul", float() if value:
                edits.multiply(value)
            case "truediv", float() if value:
                edits.multiply(1 / value)
            case _:
                return False
        self.edits, self._target = edits, which
        self.count += 1
        return True

    @property
    def _like(self) -> Any:
        return self._known.like[self._target if isinstance(self._target, int) else 0] if self._known else None

    def row_of(self, value: Any, anywhere: bool = False) -> torch.Tensor | float | None:
        """What can be given to a row of each request: one number, one vector, or a vector each."""
        like = self._like
        if like is None:
            return None
        return _rows_of(value, self._members, like.shape[-1], None if anywhere else like.device)

    def expression(self, which: Any) -> Row | None:
        """What is there now."""
        if self._like is None or self._target not in (None, which) or not isinstance(which, (int, Stream)):
            return None
        return Row(Affine(self.edits), self._like.dtype)

    def edit(self) -> TableEdit:
        assert self.edits is not None
        stream = self._target if isinstance(self._target, Stream) else None
        part = self._target if isinstance(self._target, int) else 0
        return TableEdit(part, stream, AffineOfMany(self.edits, self._members))


def expression_of(step: Noted, of: Callable[[Any], Operand]) -> Expression | None:
    match step.what, step.args:
        case "rows", (value, key):
            return made_of("rows", of(value)) if _is_whole(key) else None
        case "apart", (value, "matmul", (torch.Tensor() as other,), _, _):
            return product(of(value), other, of)
        case "product", (value, other, _):
            return made_of("matmul", of(value), of(other))
        case ("apart", (value, "sum", (), {"dim": -1 | 1, **more}, _)) | ("apart", (value, "sum", (-1 | 1,), more, _)):
            return made_of("sum", of(value)) if more.keys() <= {"keepdim"} else None
        case "apart", (value, "unsqueeze", _, _, _):
            return made_of("unsqueeze", of(value))
        case ("neg" | "float") as name, (value,):
            return made_of(name, of(value))
        case name, (left, right) if name in OPERATIONS:
            return made_of(name, of(left), of(right))
    return None


def _is_whole(key: Any) -> bool:
    """Whether it means the one row that there is."""
    return key in (0, -1) if isinstance(key, int) else len(range(1)[key]) == 1


def part_of(which: Any, key: Any, what: str) -> Any:
    """A part of what a place holds, as ``which`` says it; None if it is not all of one request's rows, of which there
    is one."""
    if which is None:
        return None
    if what == "part":
        return which[key]
    return which if _is_whole(key) else None


def _rows_of(value: Any, count: int, width: int, device: torch.device | None) -> torch.Tensor | float | None:
    """What is added to each of ``count`` rows: one number, one vector, or a vector each."""
    if not isinstance(value, Packed):
        return as_row(value, width, device)
    tensor = value.tensor
    one_each = value.counts is None or all(each == 1 for each in value.counts)
    if not one_each or tensor.shape[0] != count or as_row(tensor[0], width, device) is None:
        return None
    return tensor if tensor.dim() == 2 else tensor.reshape(count, width)
