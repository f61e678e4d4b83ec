"""Blocks beside a forward that is compiled, or is one CUDA graph: served at tapped places alone.

A tap is an operation that the model's code was given at a place. Where Python runs between compiled
pieces, the tap hands over the live value, and blocks are served as they always are. In a graph that
holds the whole forward it copies the value, and blocks are served after the forward, from the copies.
What can't be done so is done by running the forward once more, eagerly: it writes the same rows of the KV
cache again, and what blocks have written in the first run is written again where they wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from insitu.run.anatomy import Stream
from insitu.run.block_run import BlockRun
from insitu.run.foreseen import Foreseen
from insitu.run.going_ahead import GoingAhead, has_company
from insitu.run.interleaver import RowsOf
from insitu.run.promised import Like, Promisable
from insitu.run.served import Served, numbers_of
from insitu.run.snapshot import SharedServed, Snapshot
from insitu.run.structure import Structure
from insitu.run.taps import Edits, Path, Spans, Taps, layer_outputs, put_in_place
from insitu.run.torch_state import BlockState
from insitu.tree import Place

_FEW = 8


class TappedInterleaver(GoingAhead):
    """Chooses for each step how it runs. ``repeatable``: a forward can be run twice with the same result."""

    tapped: bool
    one_graph: bool
    touched: set[int]

    def __init__(
        self,
        root: torch.nn.Module,
        unembed: Callable[[torch.Tensor], torch.Tensor],
        safe_ids: int,
        taps: Taps,
        repeatable: bool,
    ) -> None:
        super().__init__(root, unembed, safe_ids)
        self._taps = taps
        self._repeatable = repeatable
        self._structures: dict[Place, Structure] = {}
        self._compiled = False
        self._live = False
        self._shown: list[tuple[Place, BlockRun, Served]] = []
        self._pending: list[tuple[Place, BlockRun, Served]] = []
        self._stale: set[BlockRun] = set()
        self._promisable: dict[Place, Promisable] = {}
        self._edits: Edits = {}
        self._plan: Any = None
        self._rewritten: frozenset[Place] = frozenset()
        self._table_edits = 0
        self._foreseen: dict[BlockRun, Foreseen] = {}
        self._held_by_nobody = layer_outputs(self.anatomy)

    # -- one step -------------------------------------------------------------------------

    def begin(self, runs: Iterable[BlockRun]) -> bool:
        runs = list(runs)
        waits = super().begin(runs)
        self._foresee(runs)
        path = self._chosen() if waits else Path.TAPPED if self.ahead.now else Path.PLAIN
        promised = self.ahead.edits()
        self._edits = self._all_edits() if path is Path.TAPPED else promised
        fits = path not in (Path.TAPPED, Path.OPEN) or self._taps.fits(self._edits)
        if not fits:
            path, self._edits = Path.OPEN, promised
        if path is not Path.TAPPED:
            self._foreseen.clear()  # who stands for many edits as all do
        self.tapped, self.one_graph = path in (Path.TAPPED, Path.OPEN), path is not Path.OPEN
        self._rewritten = frozenset(promised)
        if self.tapped:
            self._plan = self._taps.take(self._edits if fits else {})
        else:
            self._taps.clear()
        return path is Path.EAGER

    def _foresee(self, runs: Iterable[BlockRun]) -> None:
        """What runs that each stand for many are going to do in this step, which all its places are tapped for."""
        self._foreseen.clear()
        for run in runs:
            if run.many is None:
                continue
            at_tap = run.waiting is not None and run.waiting.in_forward and run.in_step and run.step > 0
            with BlockState():
                found = run.many.foresee(self) if at_tap else None
            if found is not None:
                self._foreseen[run] = found

    def _all_edits(self) -> Edits:
        edits: dict[Place, dict[BlockRun, Any]] = self.ahead.edits()
        for run, foreseen in self._foreseen.items():
            for place, edit in foreseen.edits.items():
                edits.setdefault(place, {})[run] = edit
        return edits

    @property
    def counts(self) -> tuple[int, int]:
        """Visits for which blocks did not wait, and rows that tables have edited."""
        return self.ahead.promised, self._table_edits

    def faults(self) -> Sequence[float]:
        """How far each tap's table edits rows otherwise than it should."""
        return self._taps.faults()

    # -- what is known of places before the forward (``foreseen.Known``) --------------------

    def is_served(self, place: Place) -> bool:
        return place in self._structures

    def promisable(self, place: Place) -> Promisable | None:
        return self._promisable.get(place) or self._learn(place)

    def stream(self, name: str, layer: int | None) -> Stream:
        return self.anatomy.stream(name, layer)

    def idle(self) -> None:
        super().idle()
        self._taps.clear()

    def _learn(self, place: Place) -> Promisable | None:
        structure, copies = self._structures.get(place), self._taps.editable(place)
        if structure is None or not copies:
            return None
        like = tuple(Like((1, *each.shape[1:]), each.dtype, each.device) for each in copies)
        known = self._promisable[place] = Promisable(place, structure, like)
        return known

    def _chosen(self) -> Path:
        waited = {place for place in self._waiting if place.in_forward}
        if not self.in_use or not waited | self._recorded() <= self._structures.keys():
            return Path.EAGER
        runs = [run for place, waiting in self._waiting.items() if place.in_forward for run in waiting]
        runs = [run for run in runs if run not in self._foreseen]
        if not runs and not self._recorded():
            return Path.TAPPED
        habits = [self._habits.of(run) for run in runs]
        if any(run.names_source or has_company(run) for run in runs) or any(habit.leaves_taps for habit in habits):
            return Path.EAGER
        edits = any(habit.edits for habit in habits)
        return Path.OPEN if edits or not self._repeatable else Path.TAPPED

    def _recorded(self) -> set[Place]:
        return {place for _, recorder in self._recorders for place in recorder.places}

    def open(self, rows: RowsOf) -> None:
        super().open(rows)
        for place in self.ahead.now.places | self._rewritten:
            self._watch(place)

    def open_compiled(self, rows: RowsOf, spans: Spans) -> None:
        """As ``open``, for a forward that is not eager: no module is watched. ``spans``: the requests' rows."""
        self.rows = rows
        for run, foreseen in self._foreseen.items():
            if run.many is not None and run in rows:
                with BlockState():
                    foreseen.narrow(run.many.members)
        self._taps.lay(rows, spans)
        self._open = self._compiled = True
        self._live = False
        self._called.clear()
        self._reached = 0

    def pass_by(self, place: Place, floating: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        """Python is at the tap of ``place`` in the forward: these are the live tensors."""
        if not self._compiled or self.calls.running:
            return
        self._live = True
        if place in self.ahead.now.places or place in self._waiting or self._recorders:
            self._serve_compiled(place, floating, others)

    def after_compiled(self) -> bool:
        """The forward is over. True if it must be run once more, eagerly, after another ``open``."""
        if not self._live:
            for run, foreseen in self._foreseen.items():
                foreseen.in_force, run.edited = True, run.edited or bool(foreseen.edits)
            self._table_edits += sum(
                len(run.many.members) if run.many is not None else 1
                for each in self._edits.values()
                for run in each
                if run in self.rows
            )
            self._fulfil_from_copies()
            self._serve_copies()
        self._compiled = False
        left = {run for place, runs in self._waiting.items() if place.in_forward for run in runs}
        for run in left - self._stale:
            self._habits.of(run).leaves_taps = True
        again = bool(left or self._stale)
        if again:
            self._pending = [entry for entry in self._shown if entry[2].edited]
            self._rewritten = frozenset(self._edits) | {place for place, _, _ in self._pending}
            for run, recorder in self._recorders:
                recorder.forget(run.steps - 1)
        self._shown.clear()
        self._stale.clear()
        return again

    def _fulfil_from_copies(self) -> None:
        total = next(iter(self.rows.values())).total
        for place in self.ahead.now.places:
            if copies := self._taps.copies(place, total):
                with BlockState():
                    self.ahead.keep_at(place, self._structures[place].filled(*copies), self.rows)

    def _serve_copies(self) -> None:
        recorded = self._recorded()
        total = next(iter(self.rows.values())).total
        for place in sorted(self._structures, key=self.order.position):
            if place in self._waiting or place in recorded:
                copies = self._taps.copies(place, total)
                if copies is not None:
                    self._serve_compiled(place, *copies)

    def _serve_together(self, place: Place, live: Any) -> Any:
        """Where many requests wait at ``place``: copies it for all at once. Returns what is left of it."""
        waiting = self._waiting.get(place, ())
        runs = [run for run in waiting if run in self.rows and run not in self._stale and not run.writes_unseen]
        if not runs or self.anatomy.batched:
            return live
        groups = [[run] for run in runs if run.many is not None]
        alone = [run for run in runs if run.many is None]
        rows = sum(self.rows[run].stop - self.rows[run].start for run in alone)
        if len(alone) >= _FEW and 4 * rows >= self.rows[runs[0]].total:
            groups.append(alone)
        alike = {run for group in groups for run in group}
        self._waiting[place] = [run for run in waiting if run not in alike]
        for group in groups:
            self._reached = max(self._reached, self.order.position(place))
            live = self._serve_group(place, live, group)
        return live

    def _serve_group(self, place: Place, live: Any, runs: Sequence[BlockRun]) -> Any:
        snapshot, made = Snapshot(live, [self.rows[run] for run in runs]), list[tuple[BlockRun, Served]]()
        with BlockState():
            for number, run in enumerate(runs):
                self._habits.of(run).reads = True
                served = SharedServed(snapshot, number, place, self.modules.fixed, run.withholds)
                run.hand(served)
                self._park(run)
                if served.is_made:
                    made.append((run, served))
        copies: dict[int, torch.Tensor] = {}
        left = live
        for run, served in made:
            try:
                if left is not served.live:
                    served.move_to(left)
                left = served.write_back(copies, self._ids_below(place))
            except Exception as error:  # whatever a block left there, it is this request's error
                run.refuse(error)
            if served.edited:
                run.edited = True
                self._shown.append((place, run, served))
        return left

    def close(self) -> None:
        self._compiled = False
        self._shown.clear()
        self._stale.clear()
        self._pending.clear()
        super().close()

    # -- one place ------------------------------------------------------------------------

    def _serve_compiled(self, place: Place, floating: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        live = self._structures[place].filled(floating, others)
        # Those whose last write is not in this forward: what they would see here is not what they wrote.
        held = [run for run in self._waiting.get(place, ()) if run in self._stale]
        if held:
            self._waiting[place] = [run for run in self._waiting[place] if run not in self._stale]
        seen = len(self._shown)
        left = self._serve_if_awaited(place, self._serve_together(place, live))
        taken = left is live or self._put_in_place(place, left, floating)
        for _, run, served in self._shown[seen:]:
            habit = self._habits.of(run)
            habit.reads = True
            if served.edited:
                habit.edits, habit.leaves_taps = True, habit.leaves_taps or not taken
                if not taken or not self._live:
                    self._stale.add(run)
        if held:
            self._waiting.setdefault(place, []).extend(held)

    def _put_in_place(self, place: Place, left: Any, floating: list[torch.Tensor]) -> bool:
        """Makes replacements in the live tensors. False where others hold those, who are not to see it."""
        if place not in self._held_by_nobody:
            return False
        put_in_place(left, floating)
        return True

    def _show(self, run: BlockRun, place: Place, live: Any) -> Served:
        served = super()._show(run, place, live)
        if self._compiled:
            self._shown.append((place, run, served))
        return served

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        if not self._compiled and place not in self._structures and self._may_be_tapped(place):
            self._structures[place] = Structure(live)
        return super()._serve_if_awaited(place, live)

    def _may_be_tapped(self, place: Place) -> bool:
        return place in self._taps.places

    def _write_again(self, place: Place, live: Any, copies: dict[int, torch.Tensor]) -> Any:
        if edited := self._edited_again(place, live):
            self.touched |= numbers_of(edited, live)
        if place in self.ahead.now.places:
            with BlockState():
                self.ahead.keep_at(place, live, self.rows)
        for entry in [entry for entry in self._pending if entry[0] == place]:
            self._pending.remove(entry)
            _, run, served = entry
            try:
                served.move_to(live)
                live = served.write_back(copies, self._ids_below(place))
                self.touched |= served.touched
            except Exception as error:  # as where it was first written
                run.refuse(error)
        return live

    def _edited_again(self, place: Place, live: Any) -> list[torch.Tensor]:
        """The tensors in which what tables do, or would do, is done here."""
        edited: list[torch.Tensor] = []
        for run, visit in self.ahead.now.visits.get(place, ()):
            if run in self.rows:
                edited += visit.apply(live, self.rows[run])
        for run, foreseen in self._foreseen.items():
            if foreseen.in_force and run in self.rows and place in foreseen.edits:
                edited += foreseen.edits[place].apply(live, self.rows[run])
        return edited

    def _watch(self, place: Place) -> None:
        if not self._compiled:
            super()._watch(place)
