"""Requests that begin in one step with blocks that do the same: one run for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from insitu.block import Block, FunctionBlock
from insitu.engine.client.tracer import Tracer
from insitu.engine.job import Job
from insitu.engine.worker.members import Cohort
from insitu.engine.worker.writing import Writing
from insitu.net.form_block import FormBlock
from insitu.run import Interleaver
from insitu.run.kinds import is_plain
from insitu.run.noted import Program
from insitu.run.shares import Shares
from insitu.tree import Node, path_of

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
    writing = Writing(group, interleaver, others)
    program = writing.written_down(max(one.ends for one in group))
    if program is None or program.error is not None:
        return None
    begins = program.steps and program.steps[0].what in ("read", "stream")
    takes_steps = any(step.what in _STEPS for step in program.steps)
    if takes_steps and not all(one.is_whole for one in group):
        return None  # a chunk of its prompt is a step, too
    if not (begins or (takes_steps and program.steps[0].what in _STEPS)):
        return None
    if takes_steps and not _may_end_apart(group, program, writing):
        return None
    everybody = tuple(range(len(group)))
    stale = writing.stale if takes_steps else _never
    text = first.execution().text()
    shares = Shares(interleaver.sender)
    together = writing.makes(program, everybody, writing.own, writing.ended_after, stale, text, shares)
    together.widths = writing.widths
    return Cohort(together, interleaver, first.owner, program.lost)


def _may_end_apart(group: Sequence[Candidate], program: Program, writing: Writing) -> bool:
    """Whether each request may end when it does, as far as that has to be known before they begin."""
    lengths, most = {one.job.length for one in group}, max(one.ends for one in group)
    ends: Iterable[int] = {one.ends for one in group} if len(lengths) > 1 else ()
    if None in lengths and writing.is_restricted:  # none is to fail where it does not alone
        ends = range(1, most)
        if most > _MOST_ENDS:
            return False
    return all(program.can_end_as(steps, writing.ended_after) for steps in ends)


_MOST_ENDS = 32
_STEPS = ("go_to", "move_on")


def _never() -> None:
    return None


def _key(job: Job) -> Any:
    block: Any = job.block
    if isinstance(job.block, FunctionBlock) and isinstance(job.block.fn, FormBlock):
        return job.trace or id(job)  # which has one form for all its prompts
    if isinstance(job.block, FunctionBlock) or (job.trace and not hasattr(block, "namespace")):
        return id(block)
    restricted = job.trace and hasattr(block, "written")
    if not (restricted or type(block) is Block) or job.exports or job.fresh:
        return id(job)
    sign = _sign_copy if restricted else _sign
    values = tuple((name, sign(value)) for name, value in job.values.items())
    return job.trace, block if restricted else block.code, job.module_name, job.shared, values


def _sign_copy(value: Any) -> Any:
    """Of a value that came over the network, of which each request has a copy."""
    if type(value) in (list, tuple):
        return type(value), tuple(map(_sign_copy, value))
    return (Node, path_of(value)) if isinstance(value, Node) else _sign(value)


def _sign(value: Any) -> Any:
    if isinstance(value, Tracer):
        return Tracer  # of which a block sees the steps alone
    if type(value) is torch.Tensor:
        with suppress(Exception):
            return "tensor", value.shape, value.dtype, value.device, value.layout, value.requires_grad
    return (type(value), repr(value)) if is_plain(value) else id(value)
