"""What a block that was written down is going to edit in a step, before the step's forward begins.

Its steps are known, so that tables in the graph can do its edits for all requests at once: the block is served
afterwards, from what the graph left, and what the tables did it does not do again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from insitu.run.expression import Operand
from insitu.run.noted import OPERATIONS, Noted, Program, Ref, refs_in
from insitu.run.packed import Members
from insitu.run.promised import Promisable
from insitu.run.stream import Stream
from insitu.run.visit import Made, TableEdit, Visit, expression_of, part_of
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
        self._visits: list[Visit] = []
        self._of: dict[int, tuple[Visit, Any]] = {}
        """Values of the step's places: whose, and which tensor, as a number or what holds numbers, or the stream."""
        self._made: dict[int, Made] = {}
        """What is made of them to edit them by."""
        self._late: set[int] = set()
        self._early: dict[int, Noted] = {}
        self._changing = False
        self._done: set[int] = set()
        self._at: Visit | None = None

    def through(self, program: Program, start: int, before: Foreseen | None) -> Foreseen | None:
        """None if there is something that tables can't do, or a place that has no tap. ``before``: of an earlier step,
        whose edits are taken again where they are the same, so that a table which has them is known to."""
        end = start
        while end < len(program.steps) and program.steps[end].what not in ("go_to", "move_on"):
            if not self._goes(end, program.steps[end]):
                return None
            end += 1
        freed = {number for at in range(start, end + 1) for number in program.frees.get(at, ())}
        if not self._leaves_out(freed - program.comes_home.keys()):
            return None
        edits = {visit.place: visit.edit() for visit in self._visits if visit.edits is not None}
        for place, old in before.edits.items() if before is not None else ():
            if place in edits and edits[place].is_like(old):
                edits[place] = old
        return Foreseen(self._members, edits, frozenset(self._done))

    def _leaves_out(self, freed: Collection[int]) -> bool:
        """Whether all that was made of places is either there only for edits that tables do, or can be made of what
        these leave, since there is no edit after it."""
        for number, made in reversed(self._made.items()):
            if made.used or number not in freed:
                if made.edits != made.visit.count:
                    return False
                for each in made.of:
                    self._made[each].used = True
            elif made.visit.count:
                self._done.add(made.at)
        return True

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
                if not isinstance(value, Ref) or not (self._is_itself(step, value) or self._replaces(step, value)):
                    return False
                self._done.add(at)
            case "part" | "rows", (Ref() as value, key) if value.number in self._of and step.result is not None:
                visit, which = self._of[value.number]
                self._of[step.result.number] = visit, part_of(which, key, step.what)
            case "edit", (target, _, _, what, value):
                return self._edits(at, target, what, value)
            case _:
                made = self._expression(at, step)
                if made is None or step.result is None:
                    self._use(step)
                else:
                    self._made[step.result.number] = made
                    self._late.add(step.result.number)
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
            self._at = Visit(place, self._known.promisable(place), len(self._members))
            self._visits.append(self._at)
        which = self._at.which(stream)
        self._of[result.number] = self._at, which
        self._at.ways.add(isinstance(which, Stream))
        return True

    def _is_itself(self, step: Noted, value: Ref) -> bool:
        """Whether what is written at a place is the value that was read there, as in ``place += vector``."""
        visit, which = self._of.get(value.number, (None, None))
        if visit is None or visit is not self._at or which is None:
            return False
        if step.what == "write":
            return step.args[0] == visit.place and which == visit.which(None)
        return which == visit.which(self._known.stream(*step.args[:2]))

    def _replaces(self, step: Noted, value: Ref) -> bool:
        """Whether a stream is set to what a table can make of it, which is noted."""
        made, visit = self._made.get(value.number), self._at
        if step.what == "write" or made is None or visit is None or made.visit is not visit:
            return False
        return visit.take(visit.which(self._known.stream(*step.args[:2])), "copy", made.value)

    def _edits(self, at: int, target: Ref, what: str, value: Any) -> bool:
        visit, which = self._of.get(target.number, (None, None))
        if visit is None or visit is not self._at:
            self._changing = self._changing or visit is None
            for ref in refs_in(value):
                self._note_use(ref)
            if target.number in self._made:
                self._note_use(target)
            return True
        made = self._made.get(value.number) if isinstance(value, Ref) else None
        own = made.value if made is not None and made.visit is visit else None
        given = self._given(value) if made is None else own
        if given is None or which is None or not visit.take(which, what, given):
            return False
        self._done.add(at)
        return True

    # -- what is made of a place's value ------------------------------------------------------

    def _expression(self, at: int, step: Noted) -> Made | None:
        """What the step makes of the value of the place where the block is, if a table can make it too."""
        visit, refs = self._at, refs_in(step.args)
        if visit is None or visit.used or not any(ref.number in self._of or ref.number in self._made for ref in refs):
            return None

        def of(value: Any) -> Operand:
            if not isinstance(value, Ref):
                return visit.row_of(value)
            if value.number in self._made:
                made = self._made[value.number]
                return made.value if made.visit is visit else None
            if value.number in self._of:
                owner, which = self._of[value.number]
                return visit.expression(which) if owner is visit else None
            return visit.row_of(self._given(value))

        value = expression_of(step, of)
        if value is None:
            return None
        return Made(visit, value, at, visit.count, [ref.number for ref in refs if ref.number in self._made])

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
        if ref.number in self._made:
            self._made[ref.number].used = True
        elif ref.number in self._of:
            self._of[ref.number][0].used = True
