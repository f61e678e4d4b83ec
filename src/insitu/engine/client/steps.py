"""Steps of generation, as a block loops over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from insitu.block import ArgumentError, CapturedBody, NotReachedError, OutOfOrderError, Site, current_saves
from insitu.tree import Session, session_for

StepIndex = int | slice | Iterable[int]


class Steps:
    """``tracer.iter``: indexed by a step, a slice or a list of steps, it gives a loop over them."""

    def __getitem__(self, index: Any) -> StepLoop:
        return StepLoop(index)


class StepLoop(CapturedBody):
    """The steps of an index, in order: as a loop, or as a ``with`` whose body is run for each.

    A loop without an end goes on until the request has ended. One with an end that the request does
    not reach raises ``NotReachedError``, which says how many steps there were.
    """

    def __init__(self, index: StepIndex) -> None:
        self._index = index

    def __iter__(self) -> Iterator[int]:
        session = session_for("`tracer.iter`")
        steps, bounded = self._steps(session)
        for step in steps:
            if not _go_to(session, step):
                if bounded:
                    raise NotReachedError(
                        f"`tracer.iter` was to reach step {step}, but the request ended after {session.seen} "
                        f"step{'' if session.seen == 1 else 's'}: raise max_tokens, or loop over tracer.iter[:]"
                    )
                return
            yield step

    def target(self) -> Any:
        return None

    def run_block(self, site: Site) -> BaseException | None:
        block, scope, saves = site.block, site.scope, current_saves.get()
        assert saves is not None, "a running block has its saves"
        for step in self:
            site.bind_target(step)
            namespace = block.namespace(scope.values(block.reads), saves, scope.module_name)
            try:
                block.execute(namespace)
            finally:
                scope.bind({name: namespace[name] for name in block.binds if name in namespace})
        return None

    def _steps(self, session: Session) -> tuple[Iterable[int], bool]:
        index = self._index
        if isinstance(index, int):
            return [_position(index, session)], True
        if isinstance(index, slice):
            if index.step is not None and index.step < 1:
                raise ArgumentError(f"steps go forwards: the step of the slice must be at least 1; got {index.step}")
            start = _position(index.start or 0, session)
            if index.stop is None:
                return count(start, index.step or 1), False
            return range(start, _position(index.stop, session), index.step or 1), True
        steps = [_position(step, session) for step in index]
        if steps != sorted(set(steps)):
            raise ArgumentError(f"steps go forwards: give the list in rising order; got {steps}")
        return steps, True


def _go_to(session: Session, step: int) -> bool:
    try:
        return session.go_to(step)
    except OutOfOrderError as error:
        on = f", or go on with `tracer.iter[{session.step + 1}:]`" if session.step < session.seen else ""
        raise OutOfOrderError(f"{error}. No step comes twice: do all that it is for in one loop{on}") from None


def _position(step: int, session: Session) -> int:
    if step >= 0:
        return step
    if session.length is None:
        raise ArgumentError(
            f"step {step} counts from the end, which is not known beforehand: set ignore_eos=True with max_tokens "
            f"(or min_tokens=max_tokens), or count from the start"
        )
    if step + session.length < 0:
        raise ArgumentError(f"step {step} is before the first of {session.length} steps")
    return step + session.length
