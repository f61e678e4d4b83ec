"""Requests that begin in one step with blocks that do the same: one run for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast

import torch

from insitu.block import Block, FunctionBlock, Lost, Saves
from insitu.engine.job import Job
from insitu.run import BlockRun, Interleaver, Outcome, Rows
from insitu.run.held import Held, NotStraightError, Shown, require_known
from insitu.run.straight import (
    BUILTINS,
    Program,
    Recording,
    Sym,
    can_come_home,
    captured,
    is_plain,
    shown,
    with_values,
)
from insitu.run.together import OtherKindError, Together
from insitu.tree import LayerStream, ModelPlaces, Node, current

LEAST = 4
"""Fewer requests than so many each have a run of their own."""


class Cohort:
    """Requests whose blocks are run as one, beside the rows of all."""

    def __init__(self, together: Together, leader: BlockRun, lost: Sequence[Lost], kinds: dict[Any, Any]) -> None:
        self.together = together
        self.leader = leader
        self.lost = lost
        self.members: list[Member] = []
        self._kinds = kinds

    def settle(self, rows: Mapping[Any, Rows]) -> Rows | None:
        """The rows of all; None if there are others' between them."""
        order = sorted(range(len(self.members)), key=lambda index: rows[self.members[index]].start)
        mine = [rows[self.members[index]] for index in order]
        if any(one.stop != other.start for one, other in pairwise(mine)):
            return None
        if not self.together.order:
            self.together.order = order
            self.together.counts = [self.members[index].rows for index in order]
            for number, index in enumerate(order):
                self.members[index].number = number
        return mine[0]._replace(stop=mine[-1].stop)

    def error(self, number: int) -> BaseException | None:
        error = self.leader.error
        if isinstance(error, OtherKindError):
            self._kinds.update(dict.fromkeys(self._kinds))  # nothing is known for sure any more
        return None if error is None else self.together.error_like(error, number)


class Member:
    """One request of a cohort, where a host has the run and the execution of its block."""

    order = 0
    started = True
    stopping = False
    skipping = False
    names_source = False
    waiting = None
    recorders: Sequence[Any] = ()
    wake = 0
    drawn: ClassVar[Any] = deque[Any](maxlen=0)

    __slots__ = ("__weakref__", "_error", "about", "beside", "cohort", "number", "request", "rows", "steps")

    def __init__(self, cohort: Cohort, about: Any) -> None:
        self.cohort = cohort
        self.about = about
        self.request: str = about.request
        self.rows: int = about.scheduled
        self.steps = 0
        self.number = 0
        self.beside: list[Any] = []
        self._error: BaseException | None = None
        cohort.members.append(self)

    @property
    def done(self) -> bool:
        return self.cohort.leader.done

    @property
    def edited(self) -> bool:
        return self.cohort.leader.edited

    @property
    def error(self) -> BaseException | None:
        if self._error is None and self.cohort.leader.error is not None:
            self._error = self.cohort.error(self.number)
        return self._error

    @property
    def returned(self) -> Any:
        return self.cohort.together.returned(self.number)

    def refuse(self, error: BaseException) -> None:
        if self.error is None:
            self._error = error

    throw = refuse

    def kill(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        self.cohort.together.release(self.number)

    def saved(self) -> dict[str, Any]:
        return self.cohort.together.saves(self.number)

    def outcome(self) -> Outcome:
        error = self.error
        lost = self.cohort.lost if error is None else ()
        return Outcome(self.saved(), returned=self.returned, error=error, lost=lost)


class Candidate(NamedTuple):
    """A request that is about to begin, alone or in company."""

    job: Job
    tokens: int
    about: Any


def grouped(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Those whose blocks may do the same, as far as their values tell that are not tensors."""
    groups: dict[Any, list[Candidate]] = {}
    for one in candidates:
        groups.setdefault(_key(one.job), []).append(one)
    return list(groups.values())


def cohort_of(group: Sequence[Candidate], interleaver: Interleaver, others: Callable[[], bool]) -> Cohort | None:
    """One run for all of a group; None if its block does not do the same beside each of them. ``others``: whether
    there are other blocks, which may change the caller's tensors and lists while this one runs."""
    first = group[0].job
    places = interleaver.anatomy
    shortest = min(one.tokens for one in group)
    recording = Recording(
        first.owner, interleaver.kinds.get, lambda name, layer: places.stream(name, layer).place, shortest
    )
    own: dict[Sym, Sequence[torch.Tensor]] = {}

    def show(value: Any) -> Any:
        seen = shown(value, _answers)
        if isinstance(seen, (Held, Shown)) and others():
            raise NotStraightError
        return seen

    def value_of(name: str, value: Any) -> Any:
        if type(value) is torch.Tensor and any(one.job.values[name] is not value for one in group):
            show(value)
            sym = captured(recording, value)
            own[sym] = [one.job.values[name] for one in group]
            return sym
        return show(value)

    token = current.set(cast("Any", recording))
    try:
        _write_down(first, show, value_of, recording.program)
    except (NotStraightError, Exception):
        return None
    finally:
        current.reset(token)
    program = recording.program
    left = [*program.saves.values(), program.returned]
    begins = program.steps and program.steps[0].what in ("read", "stream")
    if program.refused or not begins or not all(can_come_home(value, seen) for seen in [set[int]()] for value in left):
        return None
    together = Together(program, own, first.execution().text())
    leader = BlockRun(together, interleaver, first.length)
    leader.owner = first.owner
    return Cohort(together, leader, program.lost, interleaver.kinds)


def _write_down(job: Job, show: Any, value_of: Any, program: Program) -> None:
    block = job.block
    if isinstance(block, FunctionBlock):
        if type(block.fn) is not FunctionType:
            raise NotStraightError
        function = with_values(block.fn, show)
        program.returned = function(job.tracer)
        return
    require_known(block.code)
    saves = Saves()
    namespace = block.namespace({name: value_of(name, value) for name, value in job.values.items()}, saves, "")
    namespace.update(__builtins__=BUILTINS, __name__=job.module_name)
    block.execute(namespace)
    program.saves = saves.collect(namespace, block.binds)
    home = {*program.saves, *job.shared}
    if not saves.all_home(namespace, home):
        raise NotStraightError  # whether it is lost depends on who else holds it
    program.lost = block.lost(saves, namespace, home)


def _answers(value: Any) -> bool:
    """Whether it asks the session of the block for all that it says."""
    return isinstance(value, (ModelPlaces, Node, LayerStream))


def _key(job: Job) -> Any:
    block = job.block
    if type(block) is FunctionBlock:
        return id(block)
    if type(block) is not Block or job.exports or job.fresh:
        return id(job)
    values = tuple((name, _sign(value)) for name, value in job.values.items())
    return block.code, job.module_name, job.shared, values


def _sign(value: Any) -> Any:
    if type(value) is torch.Tensor:
        with suppress(Exception):
            return "tensor", value.shape, value.dtype, value.device, value.layout, value.requires_grad
    return (type(value), repr(value)) if is_plain(value) else id(value)
