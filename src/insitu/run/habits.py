"""What blocks of the same text were seen to do at tapped places, so that the next step is run to fit."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.run.block_run import BlockRun

_KEPT = 4096


@dataclass
class Habit:
    """``reads``, ``edits``: it does so at tapped places. ``needs_values``: with more than promises can note.
    ``leaves_taps``: from one it goes on to a place without."""

    reads: bool = False
    edits: bool = False
    needs_values: bool = False
    leaves_taps: bool = False


class Habits:
    """One for the prefill, and one for the steps after, of each block."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[Habit, Habit]] = {}

    def of(self, run: BlockRun) -> Habit:
        return self._both(run)[run.steps > 1]

    def of_decoding(self, run: BlockRun) -> Habit:
        """That of the steps after the prefill."""
        return self._both(run)[True]

    def _both(self, run: BlockRun) -> tuple[Habit, Habit]:
        if run.habits is None:
            if len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            run.habits = self._known.setdefault(run.code, (Habit(), Habit()))
        return run.habits
