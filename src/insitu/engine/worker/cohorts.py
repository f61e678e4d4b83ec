"""Requests that begin in one step with blocks that do the same: one run for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch

from insitu.block import Block, FunctionBlock, Saves
from insitu.engine.client.steps import StepLoop, Steps
from insitu.engine.client.tracer import Tracer
from insitu.engine.job import Job
from insitu.engine.worker.members import Cohort
from insitu.run import Interleaver
from insitu.run.held import Held, NotStraightError, Shown, require_known
from insitu.run.kinds import is_plain
from insitu.run.noted import Program, mapped
from insitu.run.shares import Shares
from insitu.run.shown import BUILTINS, Outside, shown, with_values
from insitu.run.straight import Recording
from insitu.run.sym import Sym, can_come_home, captured, ref_of
from insitu.run.together import Together
from insitu.run.torch_state import BlockState
from insitu.tree import LayerStream, ModelPlaces, Node, current, session_for

LEAST = 4
"""Fewer requests than so many each have a run of their own."""


class Candidate(NamedTuple):
    """A request that is about to begin, alone or in company, which has no more steps than ``ends``."""

    job: Job
    tokens: int
    ends: int
    about: Any

    @property
    def is_whole(self) -> bool:
        """Whether the rest of its prompt is computed in the step in which it begins."""
        return self.about.computed + self.about.scheduled >= self.about.prompt


def grouped(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Those whose blocks may do the same, as far as their values tell that are not tensors."""
    groups: dict[Any, list[Candidate]] = {}
    for one in candidates:
        groups.setdefault((_key(one.job), one.job.length is None), []).append(one)
    return list(groups.values())


def cohorts_of(
    group: Sequence[Candidate], interleaver: Interleaver, others: Callable[[], bool]
) -> Iterator[tuple[Cohort, Sequence[Candidate]]]:
    """One run for all of a group, or for those of certain lengths that have the same. ``others``: whether there are
    other blocks, which may change the caller's tensors and lists while this one runs."""
    cohort = _cohort_of(group, interleaver, others) if len(group) >= LEAST else None
    by_length: dict[int | None, list[Candidate]] = {}
    for one in group:
        by_length.setdefault(one.job.length, []).append(one)
    if cohort is not None:
        yield cohort, group
    elif len(by_length) > 1:
        for part in by_length.values():
            yield from cohorts_of(part, interleaver, others)


def _cohort_of(group: Sequence[Candidate], interleaver: Interleaver, others: Callable[[], bool]) -> Cohort | None:
    """None if the block does not do the same beside each of them."""
    first = group[0].job
    writing = _Writing(group, interleaver, others)
    program = writing.written_down(max(one.ends for one in group))
    if program is None or program.error is not None:
        return None
    begins = program.steps and program.steps[0].what in ("read", "stream")
    takes_steps = any(step.what in _STEPS for step in program.steps)
    if takes_steps and not all(one.is_whole for one in group):
        return None  # a chunk of its prompt is a step, too
    if not (begins or (takes_steps and program.steps[0].what in _STEPS)):
        return None
    lengths = {one.job.length for one in group}
    if len(lengths) > 1 and not all(program.can_end_as(one.ends, writing.ended_after) for one in group):
        return None
    everybody = tuple(range(len(group)))
    stale = writing.stale if takes_steps else _never
    text = first.execution().text()
    shares = Shares(interleaver.sender)
    together = Together(program, everybody, writing.own, writing.ended_after, stale, text, shares)
    return Cohort(together, interleaver, first.owner, program.lost)


_STEPS = ("go_to", "move_on")


class _Writing:
    """Writes down what the block of a group does; several times, if requests end at different steps."""

    def __init__(self, group: Sequence[Candidate], interleaver: Interleaver, others: Callable[[], bool]) -> None:
        self.own: dict[int, Sequence[torch.Tensor]] = {}
        self._group = group
        self._interleaver = interleaver
        self._others = others
        self._after: dict[int, Program | None] = {}
        self._seen: list[tuple[Any, Any]] = []
        self._versions: list[tuple[list[torch.Tensor], list[int]]] = []

    def ended_after(self, steps: int) -> Program | None:
        if steps not in self._after:
            self._after[steps] = self.written_down(steps, over=True)
        return self._after[steps]

    def written_down(self, ends: int, over: bool = False) -> Program | None:
        first, places = self._group[0].job, self._interleaver.anatomy
        recording = Recording(
            first.owner,
            self._interleaver.kinds.get,
            lambda name, layer: places.stream(name, layer).place,
            min(one.tokens for one in self._group),
            ends,
            {one.job.length for one in self._group},
            over,
        )
        program = recording.program
        token = current.set(cast("Any", recording))
        try:
            with BlockState():
                self._write_down(first, recording)
        except NotStraightError:
            return None
        except Exception as error:
            program.error = error
        finally:
            recording.close()
            current.reset(token)
        return None if program.refused else program

    def _write_down(self, job: Job, recording: Recording) -> None:
        block, program = job.block, recording.program
        if isinstance(block, FunctionBlock):
            if type(block.fn) is not FunctionType:
                raise NotStraightError
            function = with_values(block.fn, self._show)
            names = Outside(block.fn)
            self._seen.append((names, names()))
            returned = function(_StepsAlone())
            program.returned = _at_home(recording, returned)
            return
        require_known(block.code)
        saves = Saves()
        values = {name: self._value_of(recording, name, value) for name, value in job.values.items()}
        namespace = block.namespace(values, saves, "")
        namespace.update(__builtins__=BUILTINS, __name__=job.module_name)
        block.execute(namespace)
        saved = saves.collect(namespace, block.binds)
        home = {*saved, *job.shared}
        if not saves.all_home(namespace, home):
            raise NotStraightError  # whether it is lost depends on who else holds it
        program.saves = {name: _at_home(recording, value) for name, value in saved.items()}
        program.lost = block.lost(saves, namespace, home)

    def _show(self, value: Any) -> Any:
        if isinstance(value, Tracer):
            return _StepsAlone()
        seen = shown(value, _answers)
        if isinstance(seen, (Held, Shown)):
            if self._others():
                raise NotStraightError
            self._seen.append((value, _state(value)))
        return seen

    def _value_of(self, recording: Recording, name: str, value: Any) -> Any:
        if type(value) is torch.Tensor and any(one.job.values[name] is not value for one in self._group):
            self._show(value)
            sym = captured(recording, value)
            mine = self.own[ref_of(sym).number] = [one.job.values[name] for one in self._group]
            self._versions.append((mine, [each._version for each in mine]))
            recording.keep(sym)
            return sym
        return self._show(value)

    def stale(self) -> str | None:
        """What is to be told if a value of the caller's is not what it was."""
        same = all(_state(value) == state for value, state in self._seen)
        if same and all([each._version for each in own] == versions for own, versions in self._versions):
            return None
        return (
            "a tensor, list or name that the block was given has changed since it began, and the block had been read "
            "ahead with its old value: give each trace its own"
        )


def _state(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._version
    return value() if isinstance(value, Outside) else tuple(map(id, value))


def _never() -> None:
    return None


def _at_home(recording: Recording, value: Any) -> Any:
    if not can_come_home(value, set()):
        raise recording.refused()
    return mapped(value, Sym, ref_of)


class _StepsAlone:
    """What a block that is written down sees of its tracer."""

    @property
    def iter(self) -> Steps:
        return Steps()

    def all(self) -> StepLoop:
        return Steps()[:]

    def next(self) -> None:
        session_for("`tracer.next()`").move_on()

    def __getattr__(self, name: str) -> Any:
        raise NotStraightError


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
    if isinstance(value, Tracer):
        return Tracer  # of which a block sees the steps alone
    if type(value) is torch.Tensor:
        with suppress(Exception):
            return "tensor", value.shape, value.dtype, value.device, value.layout, value.requires_grad
    return (type(value), repr(value)) if is_plain(value) else id(value)
