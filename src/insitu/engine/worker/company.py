"""The cohorts of one host: which of them are in a step, and where their rows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insitu.engine.worker.members import Cohort
from insitu.run import BlockRun, Rows
from insitu.run.packed import Members

Settled = list[tuple[Cohort, Members, Sequence[int]]]
"""Cohorts with their members in the order of their rows, and how many each has."""


class Company:
    """In a step, ``leaders`` comes first, then ``settle`` or ``is_as`` for each meaning that its rows have."""

    def __init__(self) -> None:
        self.all: list[Cohort] = []
        self._in_step: list[Cohort] = []

    def leaders(self, scheduled: Mapping[str, int]) -> list[BlockRun]:
        """The runs in this step that each stand for many. Those of their requests that are not in it go on apart."""
        if not self.all:
            self._in_step = []
            return []
        self.all = [cohort for cohort in self.all if not cohort.leader.done]
        for cohort in list(self.all):
            absent = cohort.absent(scheduled.keys())
            if absent and len(absent) < len(cohort.members):
                self.all.append(cohort.part(absent))
        self._in_step = [cohort for cohort in self.all if not cohort.absent(scheduled.keys())]
        return [cohort.leader for cohort in self._in_step]

    def news(self) -> dict[str, dict[str, int]]:
        """For which requests the leaders in this step stand, of those that it was not told of."""
        found: dict[str, dict[str, int]] = {}
        for cohort in self._in_step:
            requests = tuple(cohort.members)
            if requests != cohort.told:
                cohort.told = requests
                found[cohort.leader.request] = {name: each.number for name, each in cohort.members.items()}
        return found

    def settle(self, rows: dict[Any, Rows], spans: Mapping[str, tuple[int, int]], total: int) -> Settled:
        """Adds the leaders' rows to those of a step, in which requests have these spans."""
        settled: Settled = []
        for cohort in self._in_step:
            mine = cohort.settle(spans, total)
            if mine is not None:
                rows[cohort.leader] = mine
                settled.append((cohort, cohort.together.members, cohort.together.counts))
        return settled

    def is_as(self, settled: Settled) -> bool:
        """Whether rows that were settled so are the step's as well; they are what they are for it then."""
        if [(each, each.together.members) for each in self._in_step] != [(each, who) for each, who, _ in settled]:
            return False
        for cohort, _, counts in settled:
            cohort.together.counts = counts
        return True

    @property
    def ended(self) -> list[str]:
        """The requests whose block has ended in this step."""
        return [request for cohort in self._in_step if cohort.leader.done for request in cohort.members]

    @property
    def edited(self) -> list[str]:
        """The requests in this step that a block has edited."""
        return [request for cohort in self._in_step if cohort.leader.edited for request in cohort.members]

    def forget(self) -> None:
        self.all, self._in_step = [], []
