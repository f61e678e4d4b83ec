"""Rows of many requests of a step: where they lie in it, and put one after another to be sent elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from insitu.run.indices import index_on
from insitu.run.served import Index, Rows

Span = tuple[int, int]


def rows_of_all(spans: Iterable[tuple[Span, int]], total: int, device: torch.device) -> Rows:
    """The rows of requests that have these spans of a step's, each with the request's number."""
    found = sorted(spans)
    mine = [span for span, _ in found]
    members, counts = tuple(number for _, number in found), [stop - start for start, stop in mine]
    whole = Rows(mine[0][0], mine[-1][1], total, members=members, counts=counts)
    if all(one[1] == other[0] for one, other in pairwise(mine)):
        return whole
    numbers = [row for span in mine for row in range(*span)]
    return whole._replace(scattered=index_on(numbers, device), numbers=numbers)


class Brought:
    """The rows of some runs, by name, one run's after another's; those beside one request share theirs.

    ``rows``: where each run's lie among what is brought together.
    """

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        self._parts: list[Index] = []
        self._sizes: list[int] = []
        own = {(each.start, each.stop): each for each in rows.values()}
        starts: dict[Span, Span] = {}
        total = 0
        for span in sorted(own):
            size = self._add(own[span])
            starts[span] = total, total + size
            total += size
        self.rows: dict[str, Rows] = {}
        for name, each in rows.items():
            start, stop = starts[each.start, each.stop]
            self.rows[name] = Rows(start, stop, total, members=each.members, counts=each.counts)

    def _add(self, rows: Rows) -> int:
        if rows.scattered is not None:
            self._parts.append(rows.scattered)
            self._sizes.append(len(rows.numbers))
            return len(rows.numbers)
        size, last = rows.stop - rows.start, self._parts[-1] if self._parts else None
        if isinstance(last, slice) and last.stop == rows.start:
            self._parts[-1] = slice(last.start, rows.stop)
            self._sizes[-1] += size
        else:
            self._parts.append(slice(rows.start, rows.stop))
            self._sizes.append(size)
        return size

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        found = [tensor[part] for part in self._parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def put(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """Puts back what they are from now on."""
        for part, rows in zip(self._parts, new.to(tensor.device).split(self._sizes), strict=True):
            tensor[part] = rows
