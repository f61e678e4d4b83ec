"""What blocks were promised of steps to come, and when.

A block that only keeps what it reads, or edits it as a table in a graph can, needs no value to go on. So it may run
its Python for many steps before the first of them begins, when the device is busy and Python is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from insitu.run.block_run import BlockRun
from insitu.run.pages import Page, RowIndex
from insitu.run.promised import Like, Promisable, PromisedServed, Target
from insitu.run.served import Rows, Served
from insitu.tree import Place

_MOST_BYTES = 2**29
_VECTORS = 2048

Key = tuple[Place, tuple[int, bool, int]]


class Coming:
    """What was promised of one step of the engine: pages, and visits with memory of their own or with edits."""

    def __init__(self) -> None:
        self.pages: dict[Key, Page] = {}
        self.streams: dict[Key, Target] = {}
        self.visits: dict[Place, list[tuple[BlockRun, PromisedServed]]] = {}

    @property
    def places(self) -> set[Place]:
        return {*self.visits, *(place for place, _ in self.pages)}

    def __bool__(self) -> bool:
        return bool(self.pages or self.visits)


class Ahead:
    """The promises of all blocks, by the step of the engine that is to keep them.

    ``most``: how many steps a block may be ahead when there is no time to spare.
    """

    def __init__(self, filled: Callable[[torch.Tensor, list[torch.Tensor]], None]) -> None:
        """``filled`` is given the memory of each page and its rows, once they have their values."""
        self.now: Coming = Coming()
        self.promised: int = 0
        self.most = 8
        self._step = 0
        self._coming: dict[int, Coming] = {}
        self._requests = 0
        self._bytes = 0
        self._filled = filled
        self._index: RowIndex | None = None
        self._vectors: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, requests: int) -> None:
        """A step of the engine begins, with so many blocks."""
        self._step += 1
        self._requests = requests
        self.now = self._coming.pop(self._step, None) or Coming()
        self._bytes -= sum(page.memory.nbytes for page in self.now.pages.values())

    @property
    def has_room(self) -> bool:
        """Whether more memory may be taken for values to come."""
        return self._bytes <= _MOST_BYTES

    def limit(self, run: BlockRun, most: int | None = None) -> int:
        """The last step that the block may do now; the one that begins next, unless its length is certain."""
        if run.length is None or not self.has_room:
            return run.wake
        return min(run.length - 1, run.wake + (self.most if most is None else most))

    def visit(
        self,
        run: BlockRun,
        known: Promisable,
        wait: Callable[[PromisedServed], Served],
    ) -> PromisedServed:
        """The block is promised a value of the step that it is in."""
        self.promised += 1
        run.last_promised = run.step
        if not self.has_room:
            run.limit = run.step
        return PromisedServed(run, known, wait, self, self._of(run))

    def _of(self, run: BlockRun) -> Coming:
        ahead = run.step - run.steps + 1
        if ahead <= 0:
            return self.now
        found = self._coming.get(self._step + ahead)
        if found is None:
            found = self._coming[self._step + ahead] = Coming()
        return found

    def memory(self, target: Target, coming: Coming, like: Like) -> torch.Tensor | None:
        """A row of a page, for a block that is going to keep it."""
        key = (target.visit.what, target.key)
        page = coming.pages.get(key)
        if page is None:
            page = coming.pages[key] = Page(like, self._requests)
            coming.streams[key] = target
            if coming is not self.now:
                self._bytes += page.memory.nbytes
        return page.take(target.visit.run)

    def vector(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of what a block adds, which it may change afterwards; the same one as long as it has not. What lies
        on the host may be changed by numpy, of which its version tells nothing."""
        if value.is_inference():
            return value.clone()
        key = (id(value), value._version)
        known = self._vectors.get(key)
        if known is None or (value.device.type == "cpu" and not torch.equal(value, known[1])):
            if len(self._vectors) >= _VECTORS:
                self._vectors.clear()
            known = self._vectors[key] = (value, value.detach().clone())
        return known[1]

    # -- the forward's side ---------------------------------------------------------------

    def edits(self) -> dict[Place, dict[BlockRun, Target]]:
        """What blocks have written into promises of this step."""
        found = {
            place: {run: target for run, visit in visits if (target := visit.affine)}
            for place, visits in self.now.visits.items()
        }
        return {place: each for place, each in found.items() if each}

    def keep_at(self, place: Place, live: Any, rows: Mapping[BlockRun, Rows]) -> None:
        """The value at ``place`` is there, edits included: gives it to those to whom it was promised."""
        for run, visit in self.now.visits.get(place, ()):
            if run in rows:
                visit.fulfil(live, rows[run])
        for key in [key for key in self.now.pages if key[0] == place]:
            page, target = self.now.pages.pop(key), self.now.streams.pop(key)
            parts = target.parts_of(live)
            if self._index is None or not self._index.is_of(rows, page.runs):
                self._index = RowIndex(rows, page.runs, parts[0].device)
            self._filled(page.fill(parts, self._index), page.promises)

    def left(self, rows: Mapping[BlockRun, Rows]) -> list[tuple[Place, BlockRun]]:
        """Promises of this step that are not kept, though its forward is over."""
        pages = [(place, run) for (place, _), page in self.now.pages.items() for run in page.runs]
        visits = [(place, run) for place, each in self.now.visits.items() for run, visit in each if visit.is_owed]
        self.now.visits.clear()  # which hold this step
        self.now = Coming()
        return [(place, run) for place, run in (*pages, *visits) if not run.done]

    def forget(self) -> None:
        """Holds nothing of any block any more."""
        self._index = None
        self._vectors.clear()
