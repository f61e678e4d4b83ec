"""Runs what was written down of a block beside many requests at once, on their rows packed together.

Only what gives each request the very bits that it would get alone is done to packed rows: picking rows, copying,
adding, subtracting, multiplying and dividing. What comes home is taken apart once, each request's in memory of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from insitu.block import EngineError
from insitu.run.apart import applied
from insitu.run.foreseen import Foreseen, Known, Look
from insitu.run.noted import OPERATIONS, Noted, Program, Ref, mapped, refs_in
from insitu.run.packed import Members, Packed, bare_tensors, changed, narrowed, packed
from insitu.run.shares import Shares
from insitu.tree import LOGITS, SAMPLES, current

Again = Callable[[int], Program | None]


class Together:
    """A program beside requests, its ``members``. Called as a block is, in a run of its own whose rows are those of
    all; ``counts`` says how many each has in the step at hand, in the order of the batch. ``values`` are those of
    captured tensors by their numbers, one for each request.

    ``again``: the program of requests that end after so many steps, before it is over; None if there is none.
    ``stale``: says what the block had read of its caller's and was changed since, if anything was.
    """

    def __init__(
        self,
        program: Program,
        members: Members,
        values: Mapping[int, Sequence[torch.Tensor]],
        again: Again,
        stale: Callable[[], str | None],
        text: Any,
        shares: Shares,
    ) -> None:
        self.members: Members = members
        self.counts: Sequence[int] = ()
        self._program = program
        self._values = values
        self._again = again
        self._stale = stale
        self._text = text
        self.shares = shares
        """What it leaves."""
        self.names: dict[int, str] = {}
        """Those of the members' requests."""
        self.widths: Mapping[int, int] = {}
        """Of what it reads, how large a row is at most, by the value's number, where that matters."""
        self._known: dict[int, Any] = {}
        self._number = 0
        self._step: Noted | None = None
        self._foreseen: Foreseen | None = None
        self._constants: dict[Any, Packed] = {}
        self._copies: dict[int, tuple[torch.Tensor, int, Packed]] = {}

    def text(self) -> Any:
        return self._text

    @property
    def requests(self) -> tuple[str, ...]:
        return tuple(self.names[member] for member in self.members)

    def parted(self, members: Members) -> Together:
        """These members by themselves, to go on where all are; the others stay."""
        shares = self.shares.parted()
        other = type(self)(self._program, members, self._values, self._again, self._stale, self._text, shares)
        own: dict[int, Packed] = {}

        def of(each: Packed) -> Packed:  # what is one here is one there; the tensors stay theirs
            return own.setdefault(id(each), each.like(each.tensor))

        other._known = {number: mapped(value, Packed, of) for number, value in self._known.items()}
        other._number, other.widths = self._number, self.widths
        self.go_on_without(members)
        return other

    def go_on_without(self, members: Members) -> None:
        self.members, self.counts = tuple(each for each in self.members if each not in members), ()

    def let_go(self) -> None:
        """Nobody asks for what it left any more: cohorts and their members hold each other, and would hold that."""
        self.shares.let_go()
        self._known.clear()
        self._constants.clear()
        self._copies.clear()

    def __call__(self) -> None:
        program = self._program
        while self._number < len(program.steps):
            self._step = step = program.steps[self._number]
            for number in program.frees.get(self._number, ()):
                self._known.pop(number, None)
            is_done = self._is_done(self._number)
            value = None if is_done else self._done(step)
            if step.what == "go_to" and value is not step.args[1]:
                program = self._ended_early(program)
            elif step.result is not None and not is_done:
                self._known[step.result.number] = value
                self.shares.note(step.result.number)
            self._number += 1
        self._step = None
        if program.error is not None:
            raise program.error
        self.shares.leave(program, self._value, self.members)
        self._known.clear()

    def _ended_early(self, program: Program) -> Program:
        """The requests are over before they had to be, or go on where they can't."""
        session: Any = current.get()
        found = None if session.in_step else self._again(session.seen)
        if found is None or not found.begins_like(program, self._number + 1):
            raise EngineError(
                f"the block ran once for many requests, and can't be told what to do beside this one, which ended "
                f"after {session.seen} steps: do what is done after the last step outside the block"
            )
        self._program = found
        return found

    # -- what is known before the forward ---------------------------------------------------

    def foresee(self, known: Known) -> Foreseen | None:
        """What tables are to do of the step that has begun, from where the block waits in it; None if they can't."""
        look = Look(known, self.members, self._foretold)
        self._foreseen = look.through(self._program, self._number, self._foreseen)
        return self._foreseen

    def _is_done(self, number: int) -> bool:
        """Whether tables have done this step of the program."""
        return self._foreseen is not None and self._foreseen.does(number)

    def _foretold(self, ref: Ref, early: Mapping[int, Noted]) -> Packed | None:
        """What the number stands for; ``early`` are the steps that make such of what is there."""
        if ref.number in self._known or ref.number in self._values:
            is_to_change = self._program.changes.get(ref.number, -1) >= self._number
            return self._as_it_is(ref) if is_to_change else self._of(ref)
        step = early.get(ref.number)
        if step is None or any(self._foretold(each, early) is None for each in refs_in(step.args)):
            return None
        made_of = self._made_of(step, early)
        value = self._constants.get(made_of)
        if value is None:
            try:
                value = self._done(step)
            except Exception:  # it is told where the block comes to it
                return None
            if made_of is not None:
                self._constants[made_of] = value
        self._known[ref.number] = value
        return self._of(ref)

    def _as_it_is(self, ref: Ref) -> Packed:
        """A copy of what the block is going to change, the same one as long as it has not."""
        value: Packed = self._of(ref)
        tensor, version, copied = self._copies.get(ref.number, (None, 0, value))
        if tensor is not value.tensor or version != value.tensor._version:
            copied = value.like(value.tensor.clone())
            self._copies[ref.number] = value.tensor, value.tensor._version, copied
        return copied

    def _made_of(self, step: Noted, early: Mapping[int, Noted]) -> Any:
        """What the step is done with, if that is the same in each step of the requests."""

        def of(value: Any) -> Any:
            if not isinstance(value, Ref):
                return type(value), id(value) if isinstance(value, torch.Tensor) else value
            if value.number in self._values:
                return value
            return self._made_of(early[value.number], early) if value.number in early else None

        parts = tuple(map(of, step.args))
        return None if None in parts else (step.what, *parts)

    # -- steps ----------------------------------------------------------------------------

    def _done(self, step: Noted) -> Any:
        session: Any = current.get()
        match step.what, step.args:
            case "go_to", (number, _):
                self.shares.send(self._program, self._number, self._known)
                began = session.go_to(number)
                if began and (changed_since := self._stale()) is not None:
                    raise EngineError(changed_since)
                return began
            case "move_on", ():
                self.shares.send(self._program, self._number, self._known)
                session.move_on()
            case "read", (place,):
                value = session.read(place)
                counts = [1] * len(self.members) if place in (LOGITS, SAMPLES) else self.counts
                assert step.result is not None
                return packed(value, self.members, counts, self._program.kinds[step.result.number])
            case "stream", (name, layer):
                return Packed(session.read_stream(name, layer), self.members, self.counts)
            case "write", (place, value):
                session.write(place, bare_tensors(self._of(value)))
            case "write_stream", (name, layer, value):
                session.write_stream(name, layer, bare_tensors(self._of(value)))
            case "part", (value, key):
                return self._of(value)[key]
            case "rows", (value, key):
                return self._of(value).rows(key)
            case "edit", (target, base, key, what, value):
                part = self._of(target)
                part.change(what, self._of(value))
                if base is not None:  # of those that picking rows has copied
                    self._of(base).set_rows(key, part)
            case "apart", (value, name, args, kwargs, each):
                return self._of(value).each_apart(lambda rows: applied(name, rows, args, kwargs), each)
            case "product", (value, other, each):
                vectors = iter(self._of(other).tensor)
                return self._of(value).each_apart(lambda rows: rows @ next(vectors), each)
            case "neg", (value,):
                return self._of(value).like(-self._of(value).tensor)
            case name, (value,):
                rows = self._of(value)
                return rows.like(getattr(rows.tensor, name)())
            case name, (left, right):
                return self._binary(OPERATIONS[name], self._of(left), self._of(right))
        return None

    def _of(self, value: Any) -> Any:
        """What a value by number is, of those requests that are here."""
        return mapped(value, Ref, lambda ref: narrowed(self._value(ref.number), self.members))

    def _value(self, number: int) -> Any:
        if number not in self._known:
            mine = self._values[number]
            self._known[number] = Packed(torch.stack([mine[each] for each in self.members]), self.members, None)
        return self._known[number]

    def _binary(self, function: Callable[..., Any], left: Any, right: Any) -> Packed:
        rows = [value for value in (left, right) if isinstance(value, Packed)]
        whole = max(rows, key=lambda value: (value.counts is not None, value.tensor.dim()))
        return whole.like(function(whole.beside(left), whole.beside(right)))

    def _failed_alone(self, member: int) -> None:
        """Once more what has failed, on the rows of one request: the message may give a shape."""

        def own(value: Any) -> Any:
            value = self._of(value)
            return value.apart()[self.members.index(member)] if isinstance(value, Packed) else value

        match self._step and (self._step.what, self._step.args):
            case "edit", (target, _, _, what, value):
                changed(own(target), what, own(value))
            case "apart", (value, name, args, kwargs, _):
                applied(name, own(value), args, kwargs)
            case "product", (value, other, _):
                torch.matmul(own(value), own(other))
            case name, (left, right) if name in OPERATIONS:
                OPERATIONS[name](own(left), own(right))

    # -- what comes home ------------------------------------------------------------------

    def error_like(self, error: BaseException, member: int) -> BaseException:
        """The error on the user's line, once more for one of the requests."""
        try:
            self._failed_alone(member)
        except Exception as alone:
            error = alone if type(alone) is type(error) else error
        try:
            own = copy.copy(error)
        except Exception:
            own = error
        if self._step is None:
            return own.with_traceback(error.__traceback__)
        code, line = self._step.line
        return raised_at(own, code, line)


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
