"""What a block that was written down is going to edit in a step, before the step's forward begins.

Its steps are known, so that tables in the graph can do its edits for all requests at once: the block is served
afterwards, from what the graph left, and what the tables did it does not do again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from insitu.run.affine import Affine, AffineOfMany, as_row
from insitu.run.noted import OPERATIONS, Noted, Ref, refs_in
from insitu.run.packed import Members, Packed
from insitu.run.promised import Promisable
from insitu.run.served import Rows
from insitu.run.stream import Stream
from insitu.run.structure import tensors_in
from insitu.tree import Place


class Known(Protocol):
    """What is known of the places of a model with taps."""

    def is_served(self, place: Place) -> bool:
        """Whether a tap serves it."""
        ...

    def promisable(self, place: Place) -> Promisable | None:
        """What is known of a place whose value a table can edit."""
        ...

    def stream(self, name: str, layer: int | None) -> Stream: ...


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

    def apply(self, live: Any, rows: Rows) -> None:
        """Does the same in the live value."""
        parts = [tensors_in(live).floating[self.number]] if self.stream is None else self.stream.parts(live)
        index = rows.of(parts[0])
        first, *others = [part[index] for part in parts]
        value = sum(others, first).clone()
        self.edits.apply(value)
        parts[0][index] = value
        for other in parts[1:]:
            other[index] = 0


class Foreseen:
    """What tables do of a step: the edits by place, for ``members`` in their order, and the numbers of the program's
    steps that are done by that, once it is ``in_force``."""

    def __init__(self, members: Members, edits: Mapping[Place, TableEdit], done: frozenset[int]) -> None:
        self.members = members
        self.edits = edits
        self.in_force = False
        self._done = done

    def does(self, step: int) -> bool:
        return self.in_force and step in self._done

    def narrow(self, members: Members) -> None:
        """From here on it is these members', in this order."""
        if members != self.members:
            at = {member: row for row, member in enumerate(self.members)}
            chosen = [at[member] for member in members]
            for edit in self.edits.values():
                edit.edits = edit.edits.narrowed(chosen)
            self.members = members


class Look:
    """Goes through the steps of a program from one on to the next step of its requests.

    ``value_of`` gives what a number stands for if that is known before the forward, else None; it is told which steps
    make such a value of others.
    """

    def __init__(self, known: Known, members: Members, value_of: Callable[[Ref, Mapping[int, Noted]], Any]) -> None:
        self._known = known
        self._members = members
        self._value_of = value_of
        self._visits: list[_Visit] = []
        self._of: dict[int, tuple[_Visit, Any]] = {}
        """Values of the step's places: whose, and which tensor, as a number or what holds numbers, or the stream."""
        self._late: set[int] = set()
        self._early: dict[int, Noted] = {}
        self._changing = False
        self._done: set[int] = set()
        self._at: _Visit | None = None

    def through(self, steps: Sequence[Noted], start: int, before: Foreseen | None) -> Foreseen | None:
        """None if there is something that tables can't do, or a place that has no tap. ``before``: of an earlier step,
        whose edits are taken again where they are the same, so that a table which has them is known to."""
        for at in range(start, len(steps)):
            if steps[at].what in ("go_to", "move_on"):
                break
            if not self._goes(at, steps[at]):
                return None
        edits = {visit.place: visit.edit() for visit in self._visits if visit.edits is not None}
        for place, old in before.edits.items() if before is not None else ():
            if place in edits and edits[place].is_like(old):
                edits[place] = old
        return Foreseen(self._members, edits, frozenset(self._done))

    def _goes(self, at: int, step: Noted) -> bool:
        match step.what, step.args:
            case "read", (place,):
                return self._arrive(step.result, place, None)
            case "stream", (name, layer):
                stream = self._known.stream(name, layer)
                return self._arrive(step.result, stream.place, stream)
            case "write", (place, _) if not place.in_forward:
                self._use(step)
            case ("write", (_, value)) | ("write_stream", (_, _, value)):
                if not isinstance(value, Ref) or not self._is_itself(step, value):
                    return False
                self._done.add(at)
            case "part" | "rows", (Ref() as value, key) if value.number in self._of and step.result is not None:
                visit, which = self._of[value.number]
                self._of[step.result.number] = visit, _part(which, key, step.what)
            case "edit", (target, _, _, what, value):
                return self._edits(at, target, what, value)
            case _:
                self._use(step)
        return True

    def _arrive(self, result: Ref | None, place: Place, stream: Stream | None) -> bool:
        assert result is not None
        if not place.in_forward:
            self._at = None
            self._late.add(result.number)
            return True
        if self._at is None or self._at.place != place:
            if not self._known.is_served(place) or any(visit.place == place for visit in self._visits):
                return False
            self._at = _Visit(place, self._known.promisable(place), len(self._members))
            self._visits.append(self._at)
        self._of[result.number] = self._at, self._at.which(stream)
        return True

    def _is_itself(self, step: Noted, value: Ref) -> bool:
        """Whether what is written at a place is the value that was read there, as in ``place += vector``."""
        visit, which = self._of.get(value.number, (None, None))
        if visit is None or visit is not self._at or which is None:
            return False
        if step.what == "write":
            return step.args[0] == visit.place and which == visit.which(None)
        return which == visit.which(self._known.stream(*step.args[:2]))

    def _edits(self, at: int, target: Ref, what: str, value: Any) -> bool:
        visit, which = self._of.get(target.number, (None, None))
        if visit is None or visit is not self._at:
            self._changing = self._changing or visit is None
            for ref in refs_in(value):
                self._note_use(ref)
            return True
        given = self._given(value)
        if given is None or which is None or not visit.take(which, what, given):
            return False
        self._done.add(at)
        return True

    def _given(self, value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        return self._value_of(value, self._early) if self._is_early(value) else None

    def _is_early(self, ref: Ref) -> bool:
        return not self._changing and ref.number not in self._late and ref.number not in self._of

    def _use(self, step: Noted) -> None:
        refs = refs_in(step.args)
        for ref in refs:
            self._note_use(ref)
        if step.result is None:
            return
        if step.what in OPERATIONS and all(map(self._is_early, refs)):
            self._early[step.result.number] = step
        else:
            self._late.add(step.result.number)

    def _note_use(self, ref: Ref) -> None:
        if ref.number in self._of:
            self._of[ref.number][0].used = True


class _Visit:
    """One place in the step. ``used``: something is done with its value, which may not be edited any more then."""

    def __init__(self, place: Place, known: Promisable | None, count: int) -> None:
        self.place = place
        self.used = False
        self.edits: Affine | None = None
        self._known = known
        self._count = count
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
        if self._known is None or self.used or self._target not in (None, which):
            return False
        if not isinstance(which, (int, Stream)):
            return False
        like = self._known.like[which if isinstance(which, int) else 0]
        value = _rows_of(value, self._count, like.shape[-1], None if what == "copy" else like.device)
        if value is None:
            return False
        edits = self.edits or Affine()
        match what, value:
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
        return True

    def edit(self) -> TableEdit:
        assert self.edits is not None
        stream = self._target if isinstance(self._target, Stream) else None
        part = self._target if isinstance(self._target, int) else 0
        return TableEdit(part, stream, AffineOfMany(self.edits, self._count))


def _part(which: Any, key: Any, what: str) -> Any:
    """A part of what a place holds, as ``which`` says it; None if it is not all of one request's rows, of which there
    is one."""
    if which is None:
        return None
    if what == "part":
        return which[key]
    whole = key in (0, -1) if isinstance(key, int) else len(range(1)[key]) == 1
    return which if whole else None


def _rows_of(value: Any, count: int, width: int, device: torch.device | None) -> torch.Tensor | float | None:
    """What is added to each of ``count`` rows: one number, one vector, or a vector each."""
    if not isinstance(value, Packed):
        return as_row(value, width, device)
    tensor = value.tensor
    one_each = value.counts is None or all(each == 1 for each in value.counts)
    if not one_each or tensor.shape[0] != count or as_row(tensor[0], width, device) is None:
        return None
    return tensor if tensor.dim() == 2 else tensor.reshape(count, width)
