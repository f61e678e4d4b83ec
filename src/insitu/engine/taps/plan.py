"""What tables are to do, by the names of requests: small enough for other ranks to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from insitu.engine.taps.tables import Entry

RowsByName = Mapping[str, Sequence[int]]


class Line(NamedTuple):
    """One edit at one place, of the rows of runs, or of requests (``of_requests``), by their names. ``slots`` are as
    those of an ``Entry``: none, one, or one for each name."""

    names: tuple[str, ...]
    of_requests: bool
    summed: bool
    part: int
    slots: tuple[Sequence[int], ...]
    factors: tuple[float, ...]

    def entry(self, runs: RowsByName, requests: RowsByName) -> Entry:
        """In a step in which those have these rows."""
        where = requests if self.of_requests else runs
        numbers, rows = [], list[int]()
        for number, name in enumerate(self.names):
            mine = where.get(name, ())
            rows += mine
            numbers += [number] * len(mine)
        slots = tuple([each[i] for i in numbers] if len(each) > 1 else each for each in self.slots)
        return Entry(rows, self.summed, self.part, slots, self.factors)


class Plan(NamedTuple):
    """All edits by place, and by width those slots whose vectors are new."""

    lines: dict[str, list[Line]]
    filled: dict[int, list[int]]


NOTHING = Plan({}, {})
