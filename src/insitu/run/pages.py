"""Memory of values to come: one tensor for all requests of a step, filled by one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from insitu.run.indices import index_on
from insitu.run.promise import Promise, release
from insitu.run.served import Rows

_ordinary = torch.Tensor


class Page:
    """Where one tensor of a place, or one stream, is going to be: a row for each request that is promised one."""

    __slots__ = ("memory", "promises", "rows", "runs")

    def __init__(self, like: Any, count: int) -> None:
        """``like``: a request's row of it, ``shape``, ``dtype`` and ``device``."""
        # Not numbers, so that nobody takes them for values.
        self.memory: torch.Tensor = torch.full(
            (count, *like.shape[1:]), torch.nan, dtype=like.dtype, device=like.device
        )
        # Views with a version counter of their own: an edit of one is none of another.
        self.rows: Sequence[torch.Tensor] = self.memory.unsafe_split(1)
        self.runs: list[Any] = []
        self.promises: list[Any] = []

    def take(self, run: Any) -> torch.Tensor | None:
        """A row for this run; None if there is none left."""
        number = len(self.runs)
        if number == len(self.rows):
            return None
        self.runs.append(run)
        self.promises.append(self.rows[number])
        return self.rows[number]

    def fill(self, parts: Sequence[torch.Tensor], mine: RowIndex) -> torch.Tensor:
        """Makes the promises ordinary tensors, whose values are the sums of ``parts``; returns all in one."""
        filled = self.memory[: len(self.runs)]
        first, *others = [part[mine.index] for part in parts]
        if len(others) == 1:
            torch.add(first, others[0], out=filled)
        else:
            filled.copy_(sum(others, first))
        for number in mine.missing:
            filled[number] = torch.nan
        for promise in self.promises:
            if promise.__class__ is Promise:
                target = promise.place
                for view in target.views:
                    release(view)
                promise.__class__ = _ordinary
                vars(promise).clear()
                if target.visit is None or not target.visit.waits:
                    target.let_go()
        return filled


class RowIndex:
    """Which rows of a live value are these runs', in their order, and the numbers of those that have none."""

    def __init__(self, rows: Mapping[Any, Rows], runs: Sequence[Any], device: torch.device) -> None:
        self._rows, self._runs = rows, list(runs)
        starts = [rows[run].start if run in rows else -1 for run in runs]
        self.missing: list[int] = [number for number, start in enumerate(starts) if start < 0]
        self.index: Any = slice(starts[0], starts[0] + len(starts))
        if self.missing or starts != list(range(starts[0], starts[0] + len(starts))):
            self.index = index_on([max(start, 0) for start in starts], device)

    def is_of(self, rows: Mapping[Any, Rows], runs: Sequence[Any]) -> bool:
        """Whether it is that of these, which are the same from step to step as a rule."""
        return rows is self._rows and runs == self._runs
