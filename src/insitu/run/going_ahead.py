"""Blocks that run ahead of the engine's steps: what they read there is promised, and given when the step is over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from insitu.run import traps, warning_handlers
from insitu.run.ahead import Ahead
from insitu.run.block_run import BlockRun
from insitu.run.habits import Habits
from insitu.run.interleaver import Interleaver
from insitu.run.promised import Promisable, PromisedServed
from insitu.run.served import Served
from insitu.run.torch_state import BlockState
from insitu.tree import RESULT, STEP, Place

_SPELL = 16


class GoingAhead(Interleaver):
    """``promisable`` says what blocks that run ahead may be promised of which places."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._habits = Habits()
        self.ahead: Ahead = Ahead(self.sender.send_rows)
        self._at_begin = False
        self._sleepers: deque[BlockRun] = deque()
        self._thread = 0

    def promisable(self, place: Place) -> Promisable | None:
        """None for a place of which nothing can be."""
        raise NotImplementedError

    def begin(self, runs: Iterable[BlockRun]) -> bool:
        runs = list(runs)
        self.ahead.begin(len(runs))
        self._thread = threading.get_ident()
        self._at_begin = True
        try:
            waits = super().begin(runs)
        finally:
            self._at_begin = False
        self._sleepers = deque(sorted(runs, key=lambda run: run.wake))
        return waits

    def idle(self) -> None:
        """A step begins that concerns no block."""
        self.ahead.begin(0)
        self._sleepers.clear()

    def forget(self) -> None:
        super().forget()
        self.ahead.forget()
        self._sleepers.clear()

    def _go_on(self, run: BlockRun, most: int | None = None) -> None:
        takes = self._takes_promises(run)
        run.promise, run.limit = (self._promise, self.ahead.limit(run, most)) if takes else (None, run.wake)
        super()._go_on(run)

    def work_ahead(self, is_time: Callable[[], bool]) -> None:
        """Blocks that need no values go on with steps to come, too."""
        if threading.get_ident() != self._thread:
            return  # blocks run in one thread only
        with BlockState():
            while self._sleepers and is_time():
                run = self._sleepers.popleft()
                sleeps = run.waiting is STEP and run.length is not None and run.steps <= run.wake < run.length
                if sleeps and self.ahead.has_room and self._takes_promises(run):
                    self._go_on(run, _SPELL)
                    self._sleepers.append(run)
        super().work_ahead(is_time)

    def _takes_promises(self, run: BlockRun) -> bool:
        """In its decode steps, a block that was seen to read or edit, and nothing that needs the values; and alone,
        since a table holds one edit of a row. Of a request of certain length each step but the first has one row."""
        if not run.started or run.done or (run.rows != 1 and run.length is None) or has_company(run):
            return False
        habit = self._habits.of_decoding(run)
        known = (habit.edits or habit.reads) and not habit.needs_values and not habit.leaves_taps
        unseen = run.names_source or run.writes_unseen or run.reads_unseen
        return known and self.in_use and not unseen and not self.anatomy.batched and warning_handlers.are_kept

    def _promise(self, run: BlockRun, place: Place) -> PromisedServed | None:
        known = self.promisable(place)
        begun = run.step < run.steps and not self._at_begin
        if known is None or begun or self._habits.of_decoding(run).needs_values:
            return None
        return self.ahead.visit(run, known, self._keep)

    def _keep(self, visit: PromisedServed) -> Served:
        self._habits.of_decoding(visit.run).needs_values = True
        return traps.wait(visit.what)

    def close(self) -> None:
        for place, run in self.ahead.left(self.rows):
            run.refuse(self._unreached(place))
        super().close()


def has_company(run: BlockRun) -> bool:
    """Whether another block beside the same request goes on: what one edits is what the other is to see."""
    return any(not other.done and other.waiting != RESULT for other in run.beside)
