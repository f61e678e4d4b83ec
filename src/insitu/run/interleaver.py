"""Runs blocks in step with a forward.

Only this belongs here: who waits where, and what happens when the forward gets there. What a
request sees of a value is in ``served``, the coroutine in ``block_run``, vLLM in the engine floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run import refusals
from insitu.run.anatomy import Anatomy
from insitu.run.block_run import BlockRun, in_order
from insitu.run.kinds import ByRows, kind_of
from insitu.run.order import require_to_come
from insitu.run.recorder import Recorder
from insitu.run.sending import Sender
from insitu.run.served import Rows, Served
from insitu.run.skips import KeptRows
from insitu.run.torch_state import BlockState
from insitu.run.watching import Watching
from insitu.tree import LOGITS, RESULT, SAMPLES, STEP, Listing, Place

RowsOf = Mapping[BlockRun, Rows]


class Interleaver(Watching):
    """The blocks beside one model. The engine calls, for each step and in this order:

    ``begin`` with the step's runs; ``open`` with their rows before the forward; ``rows`` when the
    rows change meaning (logits go by request, not by token); ``logits``; ``close`` when the forward
    is over, whatever way it ended; ``samples``; and once for each request ``finish``.
    """

    in_use = True
    """Whether taps are served at all; if not, by eager steps."""
    tapped: bool = False
    """Whether this step's blocks are served at taps, beside a compiled forward."""
    one_graph: bool = True
    """Whether that forward may be one CUDA graph."""

    def __init__(
        self, root: torch.nn.Module, unembed: Callable[[torch.Tensor], torch.Tensor], safe_ids: int = 0
    ) -> None:
        """``safe_ids``: ids below this are token ids and positions alike, for modules that take either."""
        super().__init__(root, unembed)
        self.anatomy: Anatomy = Anatomy(self.modules)
        self.rows: RowsOf = {}
        self.sender: Sender = Sender()
        self._safe_ids = safe_ids
        self._waiting: dict[Place, list[BlockRun]] = {}
        self._recorders: list[tuple[BlockRun, Recorder]] = []
        self._open = False
        self._vocabulary = 0
        self.kinds: dict[Place, Any] = {}
        """What values places were seen to hold."""
        self.touched: set[int] = set()
        """Which tensors of the place served last were edited where they are."""

    # -- one step -------------------------------------------------------------------------

    def begin(self, runs: Iterable[BlockRun]) -> bool:
        """Starts what is new, and says whether any run waits for a module in this step's forward."""
        self._waiting.clear()
        self._sourced.clear()
        runs = list(runs)
        with BlockState():
            for run in runs:
                run.steps += 1
                if run.waiting is STEP:
                    if run.steps <= run.wake:
                        continue  # it is ahead
                    self._go_on(run)
                elif not run.started and not run.done:
                    run.start()
                self._park(run)
        self._recorders = [(run, each) for run in runs if run.error is None for each in run.recorders]
        return bool(self._recorders) or any(place.in_forward for place in self._waiting)

    def _go_on(self, run: BlockRun) -> None:
        """The step that the block waits for begins."""
        run.hand(_BEGUN)

    def work_ahead(self, is_time: Callable[[], bool]) -> None:
        """Between two steps, while ``is_time``: does what can be done before it is asked for."""
        self.sender.work(is_time)

    def forget(self) -> None:
        """There are no runs any more."""
        self.sender.clear()

    def open(self, rows: RowsOf) -> None:
        """From here to ``close`` the modules that runs wait for are watched."""
        self.rows = rows
        self._open = True
        self._called.clear()
        self._reached = 0
        self.order.restart()
        if not self.order.complete:
            for path in self.modules.by_path:
                self._wrap(path)
        for place in list(self._waiting):
            self._watch(place)
        for _, recorder in self._recorders:
            self._watch_for(recorder)

    def logits(self, tensor: torch.Tensor) -> torch.Tensor:
        """Serves this step's logits ``[requests, vocab]``; returns what sampling goes on from."""
        self._refuse_unreached()
        self._vocabulary = tensor.shape[-1]
        return self._serve_if_awaited(LOGITS, tensor)

    def is_over(self, runs: Iterable[BlockRun]) -> bool:
        """Whether the rest of a step is no concern of anybody's, if these are all of its runs."""
        return self.order.complete and not self._recorders and all(run.done for run in runs)

    def close(self) -> None:
        """Takes every watch off; whoever still waits for a module gets told."""
        if not self._open:
            return
        self._refuse_unreached()
        self._watches.take_off()
        self._watched.clear()
        self._active.clear()
        self.ops.restart()
        self._open = False
        self.order.complete = self.order.complete or LOGITS in self.order

    def samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """Serves the ids drawn in this step, ``[requests, 1]`` or ``[requests]``; edits are made in it."""
        flat = tensor[:, 0] if tensor.dim() == 2 else tensor
        self._serve_samples(flat)
        drawn = flat.clone()  # one copy for all, and no wait for the device
        for run, rows in self.rows.items():
            run.drawn.append((drawn, rows.start))
        return tensor

    def _serve_samples(self, flat: torch.Tensor) -> None:
        self.kinds[SAMPLES] = ByRows(1)
        for run in self._arrived(SAMPLES):
            try:
                self._show(run, SAMPLES, flat).write_back_in_place(self._vocabulary)
            except Exception as error:  # whatever a block left there, it is this request's error
                run.refuse(error)
            self._park(run)

    def finish(self, run: BlockRun, result: Any) -> None:
        """The request is over: serves its result, and ends the block's waiting."""
        while run.waiting is not None:
            if run.waiting == RESULT:
                run.show(result, _NO_ROWS, str(RESULT))
            elif run.waiting == STEP:
                run.hand(_ENDED)
            else:
                run.throw(refusals.ended(run.waiting, run.step, run.steps))

    # -- what blocks ask ------------------------------------------------------------------

    def check(self, run: BlockRun, place: Place) -> None:
        ops = self.ops.require(place) if place.op else []
        require_to_come(run, place, self.order, learning=self._open and not self.order.complete)
        if ops:
            self.check_operation(place, run.in_step, run.at)

    def check_operation(self, place: Place, in_step: bool, at: Place | None) -> None:
        """Raises if there is no such operation, or none that can still come. ``at``: where the block is."""
        ops = self.ops.require(place)
        if in_step and place.path in self._active:
            if self.ops.has_gone_by(place, ops):
                raise refusals.gone_by(place, at)
            self.ops.require_stops(place)

    def position(self, place: Place, after: int = 0) -> int:
        return self._reached if place.op else self.order.next_visit(place, after)

    def operations(self, path: str, op: str) -> Listing:
        return self.ops.listing(path, op)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.calls.module(path, args, kwargs)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.calls.unembed(hidden)

    def record(self, run: BlockRun, recorder: Recorder) -> None:
        """From here on ``recorder`` gets what it wants of the run's steps."""
        run.recorders.append(recorder)
        self._recorders.append((run, recorder))
        if self._open:
            self._watch_for(recorder)

    # -- who waits where ------------------------------------------------------------------

    def _park(self, run: BlockRun) -> None:
        place = run.waiting
        if place in (None, STEP, RESULT) or not run.in_step:
            return
        self._wait_at(place, run)

    def _wait_at(self, place: Place, run: BlockRun) -> None:
        self._waiting.setdefault(place, []).append(run)
        if run.names_source:
            self._sourced.add(place)
        if self._open:
            self._watch(place)

    def _kept_for_skips(self, leave: Place, inputs: Any) -> KeptRows | None:
        if leave not in self._waiting:
            return None
        skipping = [self._rows_of(run) for run in self._waiting[leave] if run.skipping]
        return KeptRows(inputs, skipping, self.modules.fixed) if skipping else None

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        copies: dict[int, torch.Tensor] = {}
        self.touched = set()
        live = self._write_again(place, live, copies)
        if runs := self._arrived(place):
            live = self._serve(place, runs, live, copies)
        if self._recorders:
            self._record(place, live)
        return live

    def _serve(self, place: Place, runs: list[BlockRun], live: Any, copies: dict[int, torch.Tensor]) -> Any:
        ids_below = self._ids_below(place)
        if place not in self.kinds:
            self._learn_kind(place, live, self.rows[runs[0]])
        for run in runs:
            try:
                refusals.require_not_skipped(place, run.beside)
                served = self._show(run, place, live)
                live = served.write_back(copies, ids_below)
                self.touched |= served.touched
                run.edited |= served.edited and place.in_forward
            except Exception as error:  # whatever a block left there, it is this request's error
                run.refuse(error)
            self._park(run)
        return live

    def _learn_kind(self, place: Place, live: Any, rows: Rows) -> None:
        # Of one row, what goes by requests may look as if it went by tokens.
        if place == LOGITS or rows.stop - rows.start > 1:
            self.kinds[place] = kind_of(live, rows, self.modules.fixed)

    def _write_again(self, place: Place, live: Any, copies: dict[int, torch.Tensor]) -> Any:
        return live  # where a forward is run twice, with what blocks wrote here in the first

    def _record(self, place: Place, live: Any) -> None:
        """After the blocks at this place were served: what is recorded is what the model goes on with."""
        for entry in list(self._recorders):
            run, recorder = entry
            if run not in self.rows or (run.skipping and run.waiting is not None and place.is_inside(run.waiting)):
                continue  # it runs for the other requests alone
            if place in recorder.places and run.steps > recorder.first_step:
                try:
                    recorder.record(place, run.steps - 1, live, self._rows_of(run), self.modules.fixed)
                except Exception as error:  # no memory for it: this request's error, not the step's
                    self._recorders.remove(entry)
                    self._withdraw(run)
                    run.refuse(error)
                    self._park(run)

    def resume(self, run: BlockRun) -> None:
        """Starts a run whose request has ended, as far as it gets without another step."""
        with BlockState():
            run.start()

    def _withdraw(self, run: BlockRun) -> None:
        """Forgets where ``run`` waits."""
        for place, waiting in list(self._waiting.items()):
            self._waiting[place] = [other for other in waiting if other is not run]

    def _arrived(self, place: Place) -> list[BlockRun]:
        if place.op:
            self.ops.passed(place)
        else:
            if not self.order.complete:
                self.order.arrive(place, self._active)
            position = self.order.next_visit(place, self._reached)
            if position > self._reached:
                self._reached = position
        waiting = self._waiting.pop(place, None)
        if waiting is None:
            return []
        if absent := [run for run in waiting if run not in self.rows]:
            self._waiting[place] = absent
        return in_order(run for run in waiting if run in self.rows)

    def _ids_below(self, place: Place) -> int:
        return self.modules.vocabulary(place.path) or self._safe_ids

    def _show(self, run: BlockRun, place: Place, live: Any) -> Served:
        return run.show(live, self._rows_of(run), place, self.modules.fixed)

    def _rows_of(self, run: BlockRun) -> Rows:
        rows = self.rows[run]
        return rows._replace(batched=True) if self.anatomy.batched else rows

    def _refuse_unreached(self) -> None:
        """Ends the wait of runs for modules that the forward did not come to."""
        while late := [place for place in self._waiting if place.in_forward]:
            self._refuse(late[0], self._unreached(late[0]))

    def _refuse_inside(self, call: Place, error: LocationError) -> None:
        """Ends the wait of runs for operations in a function that can't stop at them."""
        for place in [each for each in self._waiting if each.path == call.path and each.is_inside(call)]:
            self._refuse(place, error)

    def _refuse(self, place: Place, error: Exception) -> None:
        for run in self._waiting.pop(place, ()):
            run.throw(copy(error))  # each block's own, as each has its own lines
            self._park(run)

    def _unreached(self, place: Place) -> Exception:
        passed = bool(place.op) and self.ops.has_passed(place)
        return refusals.missed(place, self.modules, id(self.modules[place.path]) in self._called, passed)


_NO_ROWS = Rows(0, 0, 0)
_BEGUN, _ENDED = (Served(answer, _NO_ROWS, str(STEP)) for answer in (True, False))
