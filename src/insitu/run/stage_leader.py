"""Blocks on the first stage of a pipeline-parallel model, beside the forwards of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from insitu.block import EngineError, RequestError
from insitu.run import refusals
from insitu.run.anatomy import Anatomy
from insitu.run.block_run import BlockRun
from insitu.run.interleaver import RowsOf
from insitu.run.modules import ModuleTable
from insitu.run.order import require_to_come
from insitu.run.parked import Parked, Telling, note_parked
from insitu.run.served import Rows, map_tensors, storage_of, tensors_of
from insitu.run.spanning import Spanning
from insitu.run.stages import (
    Answer,
    Arrived,
    Ask,
    Done,
    Failed,
    Handover,
    Link,
    Over,
    Refused,
    Released,
    Report,
    Seen,
    Stages,
)
from insitu.run.stream import Stream
from insitu.tree import LOGITS, SAMPLES, Listing, Outline, Place, current

Ended = tuple[frozenset[str], frozenset[str]]


class StageLeader(Spanning, Telling):
    """After its own part of a step it serves those that follow, each to the end of theirs."""

    leaves_ended_out = False  # before later stages know, who would wait for messages
    windowed: frozenset[str] = frozenset({"insitu_collect", "insitu_operations", "insitu_fit"})
    rows: RowsOf

    def __init__(self, root: torch.nn.Module, unembed: Callable[..., Any], safe_ids: int, link: Link) -> None:
        super().__init__(root, unembed, safe_ids, link)
        self._device = next(root.parameters()).device
        self._runs: dict[str, BlockRun] = {}
        self._news = Done()
        self._gone: set[int] = set()
        self._at = 0
        """The stage whose part of the step is under way."""
        self._listened = self._serves = self._learns = self._eager = False

    def meet(self, own: Report) -> None:
        """To be called on all stages at once."""
        reports = [own, *(self._link.receive(stage) for stage in range(1, self._link.stages))]
        self.stages: Stages = Stages(reports)
        self._table = _Modules(self.modules.root, self.stages)
        self.modules: ModuleTable = self._table
        self.anatomy: Anatomy = _Anatomy(self._table, self.stages)
        for stage in range(1, self._link.stages):
            self._link.send(stage, self.stages)

    # -- one step -------------------------------------------------------------------------

    def begin(self, runs: Iterable[BlockRun]) -> bool:
        """Whether this stage's forward has to be watched."""
        runs = list(runs)
        self._runs = {run.request: run for run in runs}
        self._listened, self._at, self._reached = True, 0, 0
        waits = super().begin(runs)
        self._learns = waits and not self.order.complete
        self._eager = self._learns or bool(self._recorders) or any(self._is_own(place) for place in self._waiting)
        return self._eager

    def hand_over(self, after_step: Callable[[], Ended]) -> bool:
        """This stage's forward is over. Returns whether a later one is watched."""
        self._serves = self._is_needed()
        over = (frozenset[str](), frozenset[str]()) if self._serves else after_step()
        for stage in range(1, self._link.stages):
            if stage == 1 or not self._serves:
                self._hand_to(stage, over)
        self._listened = self._serves
        return any(not self._is_own(place) and place.in_forward for place in self._waiting)

    def serve(self, after_step: Callable[[], Ended]) -> None:
        """Serves the later stages to the end of the step."""
        if not self._serves:
            return
        try:
            for stage in range(1, self._link.stages):
                if stage > 1:
                    self._hand_to(stage)
                self._at = stage
                self._follow(stage)
            self._at = 0
            self._end_unserved()
            over = after_step()
        except BaseException as error:
            self.fail(error)
            raise
        for stage in range(1, self._link.stages):
            self._link.send(stage, Released(over))
        self._listened = self._serves = False
        if self._learns:
            self.order.complete, self._learns = LOGITS in self.order, False

    def fail(self, error: BaseException) -> None:
        for stage in {*range(1, self._link.stages)} - self._gone:
            self._link.send(stage, Failed(f"{type(error).__name__}: {error}"))

    @contextmanager
    def window(self) -> Iterator[None]:
        """While it is open the others do what blocks ask for."""
        self._listened = True
        try:
            yield
        finally:
            self._listened = False
            for stage in range(1, self._link.stages):
                self._link.send(stage, Done())

    def _is_needed(self) -> bool:
        """Whether some block, or the recording of some values, takes part in what is still to come of the step."""
        if self._learns or self._recorders or any(self._waiting.values()):
            return True
        return any(not run.done and run.reads_tokens for run in self._runs.values())

    def _hand_to(self, stage: int, over: Ended = (frozenset(), frozenset())) -> None:
        parked: Parked = {}
        for place, waiting in self._waiting.items():
            for run in waiting if stage in self.stages.having(place) else ():
                note_parked(parked, place, run)
        message = Handover(parked, recorded=self._recorded_now(), over=over, left=tuple(self.left))
        message.together = dict(self.together)
        message.served, message.learning, message.eager = self._serves, self._learns, self._eager
        self._link.send(stage, message)

    def _follow(self, stage: int) -> None:
        """Does what the stage's forward brings, until that is over."""
        while True:
            message = self._link.receive(stage)
            if isinstance(message, Failed):
                self._gone.add(stage)
                raise EngineError(f"stage {stage} of the pipeline has failed: {message.why}")
            self._news = Done()
            self._note(message.seen)
            if isinstance(message, Over):
                self._end_stage(message)
                return
            before = self._recorded_now()
            with torch.inference_mode():
                self._serve_message(stage, message)
            self._active.clear()
            self._table.apart = frozenset()  # their memory may be another tensor's next
            recorded = self._recorded_now()
            self._news.recorded = None if recorded == before else recorded
            self._link.send(stage, self._news)

    def _serve_message(self, stage: int, message: Arrived | Refused) -> None:
        if isinstance(message, Refused):
            for place, error in message.errors.items():
                if max(self.stages.having(place), default=stage) <= stage:
                    self._refuse(place, error)
        elif message.place == SAMPLES:
            self._serve_drawn(message)
        else:
            self._serve_arrived(message)

    def _serve_arrived(self, message: Arrived) -> None:
        live = self._brought(message)
        tensors = list({id(each): each for each in tensors_of(live)}.values())
        self._table.apart = frozenset(storage_of(tensors[number]) for number in message.apart)
        self.rows = self._rows_in(message)
        self._active[:] = message.calls
        if message.place == LOGITS:
            self._vocabulary = tensors[0].shape[-1]
        value = self._serve_if_awaited(message.place, live)
        after = {id(a): b for a, b in zip(tensors_of(live), tensors_of(value), strict=True) if a is not b}
        self._news.edited = {number: tensors[number] for number in self.touched}
        self._news.replaced = {n: after[id(each)] for n, each in enumerate(tensors) if id(each) in after}

    def _serve_drawn(self, message: Arrived) -> None:
        ids, self._vocabulary = self._brought(message)
        self.rows = self._rows_in(message)
        self._serve_samples(ids)
        self._news.edited = {0: ids}

    def _end_stage(self, message: Over) -> None:
        if message.drawn is not None:
            drawn = message.drawn
            for name, row in message.rows.items():
                self._runs[name].drawn.append((drawn, row))
        for name, error in message.refused.items():
            self._runs[name].refuse(error)

    def _end_unserved(self) -> None:
        """Ends the wait of blocks for what no stage has come to."""
        while late := [place for place in self._waiting if place.in_forward]:
            called = self._is_own(late[0]) and id(self.modules[late[0].path]) in self._called
            kind = self.stages.outline.modules[late[0].path].kind
            self._refuse(late[0], refusals.left_over(late[0], kind, called))

    def _brought(self, message: Arrived) -> Any:
        with torch.inference_mode():
            return map_tensors(message.value, lambda tensor: tensor.to(self._device, copy=True))

    def _rows_in(self, message: Arrived) -> dict[BlockRun, Rows]:
        rows = {self._runs[name]: each for name, each in message.rows.items()}
        for run, each in rows.items():
            if run.many is not None:  # whose order is that of the stage
                run.many.members, run.many.counts = each.members, each.counts
        return rows

    def _note(self, seen: Seen) -> None:
        for place, calls in seen.visits:
            self.order.arrive(place, calls)
        if seen.last is not None:
            self._reached = max(self._reached, self.order.next_visit(seen.last, self._reached))

    def _recorded_now(self) -> dict[str, Any]:
        return {
            run.request: (each.places, tuple(each.paths))
            for run, each in self._recorders
            if run.steps > each.first_step
        }

    # -- what is its own and what another's -----------------------------------------------

    def _is_own(self, place: Place) -> bool:
        return place.in_forward and 0 in self.stages.having(place)

    def _watch(self, place: Place) -> None:
        if self._is_own(place):
            super()._watch(place)

    def _wrap(self, path: str) -> None:
        if path in self.modules.by_path:
            super()._wrap(path)

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        foreign = not self._is_own(place) or self._is_handed_on(place)
        return live if self._open and foreign else super()._serve_if_awaited(place, live)

    def _note_left(self, output: Place) -> None:
        if self._is_own(output):
            super()._note_left(output)

    def _refuse_unreached(self) -> None:
        """Those that a later stage may still come to wait on."""
        while late := [place for place in self._waiting if place.in_forward and self.stages.having(place) == [0]]:
            self._refuse(late[0], self._unreached(late[0]))

    # -- what blocks ask ------------------------------------------------------------------

    def check(self, run: BlockRun, place: Place) -> None:
        stages = self.stages.having(place)
        stage = self._at if self._at in stages else stages[0]
        if not place.op or not stage:
            super().check(run, place)
        else:
            require_to_come(run, place, self.order, learning=self._learns)
            self._ask(stage, "check_operation", place, run.in_step, run.at)

    def operations(self, path: str, op: str) -> Listing:
        stage = self.stages.calling(path)
        return self._ask(stage, "operations", path, op) if stage else super().operations(path, op)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = self.stages.calling(path)
        return self._ask(stage, "call", path, args, kwargs) if stage else super().call(path, args, kwargs)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ask(self._link.stages - 1, "unembed", hidden)

    def adaptable_elsewhere(self) -> set[str]:
        """The modules of later stages for which there may be adapters."""
        return set().union(*(self._ask(stage, "adaptable") for stage in range(1, self._link.stages)))

    def _ask(self, stage: int, method: str, *args: Any) -> Any:
        if not self._listened:
            raise RequestError("the request has ended: modules can't be applied to values any more")
        args = map_tensors(args, torch.Tensor.detach)
        self._link.send(stage, Ask(method, args, getattr(current.get(), "adapter", None)))
        answer: Answer = self._link.receive(stage)
        if answer.error is not None:
            raise answer.error
        return map_tensors(answer.value, lambda tensor: tensor.to(self._device))


class _Modules(ModuleTable):
    """Those of this stage, with an outline of all. ``apart``: the memory of what a later one has sent that does not go
    by rows."""

    def __init__(self, root: torch.nn.Module, stages: Stages) -> None:
        super().__init__(root)
        self._stages = stages
        self._own = super().fixed
        self.apart: frozenset[int] = frozenset()
        self.parameters = sum(report.parameters for report in stages.reports)

    @property
    def fixed(self) -> frozenset[int]:  # type: ignore[override]
        return self._own | self.apart if self.apart else self._own

    @cached_property
    def _outline(self) -> Outline:  # type: ignore[override]
        return self._stages.outline

    def owners(self, path: str) -> list[str]:
        return super().owners(path) if path in self.by_path else [path]


class _Anatomy(Anatomy):
    """The standard names as the stages tell them."""

    def __init__(self, modules: ModuleTable, stages: Stages) -> None:
        super().__init__(modules)
        self._stages = stages

    def _found(self, name: str, layer: int | None) -> Stream:
        return self._stages.stream(name, layer)
