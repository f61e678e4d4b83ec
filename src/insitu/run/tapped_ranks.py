"""Taps of a model that lies over several ranks.

Places with taps are whole on every rank: rank 0 serves them from what it has itself, and nothing is gathered.
The tables in the graphs of all ranks do the same edits: rank 0 says which, by the names of requests, when these change.
What else blocks write there is sent to the others, which wait for it between the same compiled pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run.block_run import BlockRun
from insitu.run.interleaver import Interleaver, RowsOf
from insitu.run.layouts import Gathered, gathered_whole
from insitu.run.parallel import Done, Follower, Leader
from insitu.run.parked import Parked, note_parked
from insitu.run.shards import Group
from insitu.run.structure import Structure
from insitu.run.tapped import TappedInterleaver
from insitu.run.taps import Spans, Taps, layer_outputs, put_in_place
from insitu.tree import Place


@dataclass(frozen=True)
class Begun:
    """How the step's forward runs, where what tables would do is done without them, and what tables do from here on, if
    that has changed. The vectors of that follow."""

    tapped: bool
    one_graph: bool
    eager: bool
    rewritten: frozenset[Place]
    plan: Any


@dataclass(frozen=True)
class Passed:
    """The compiled forward is over: whether it must be run once more, where blocks wait for that, and where
    what they have written is written again."""

    again: bool
    waiting: Parked
    rewritten: frozenset[Place]


class Wholes:
    """Which places with taps are whole on every rank, as eager steps have shown."""

    def __init__(self, places: Container[Place]) -> None:
        self._places = places
        self._known: set[Place] = set()
        self.others: dict[Place, LocationError] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._known

    def note(self, place: Place, gathered: Gathered | LocationError) -> None:
        if place not in self._places:
            return
        if isinstance(gathered, LocationError):
            self.others[place] = gathered
        elif any(gathered.layouts):
            self.others[place] = LocationError(
                f"taps: `{place}` lies in parts on the ranks, and a tap has those of one: leave it out of taps, and "
                f"its place is served whole by eager steps"
            )
        else:
            self._known.add(place)


class TappedLeader(Leader, TappedInterleaver):
    """Rank 0: serves blocks at taps, and tells the others what to do there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wholes: Wholes = Wholes(self._taps.places)

    def begin(self, runs: Iterable[BlockRun]) -> bool:
        with self.window() as news:
            waits = super().begin(runs)
            plan = self._plan if self.tapped else None
            news.at_taps = Begun(self.tapped, self.one_graph, waits, self._rewritten, plan)
        if plan is not None:
            self._taps.share(plan, self._group.broadcast)
        return waits

    def work_ahead(self, is_time: Callable[[], bool]) -> None:
        """Blocks go on in steps alone, in which the others do what they ask for."""
        Interleaver.work_ahead(self, is_time)

    def faults(self) -> Sequence[float]:
        """Those of the tables of all ranks, which ask at the same time: the worst of each."""
        return _worst(self._taps, self._group, next(self.modules.root.parameters()).device)

    def after_compiled(self) -> bool:
        with self.window() as news:
            again = super().after_compiled()
            waiting: Parked = {}
            for place, runs in self._waiting.items():
                for run in runs:
                    note_parked(waiting, place, run)
            news.at_taps = Passed(again, waiting, self._rewritten)
        return again

    def _serve_together(self, place: Place, live: Any) -> Any:
        return live if self._live else super()._serve_together(place, live)  # the others are told of each write

    def _may_be_tapped(self, place: Place) -> bool:
        return place in self.wholes

    def _gathered(self, place: Place, live: Any) -> Gathered | LocationError:
        if self._compiled:
            return gathered_whole(live)
        gathered = super()._gathered(place, live)
        self.wholes.note(place, gathered)
        return gathered

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        if self._compiled and not self._live:  # after the forward, from copies that are rank 0's own
            return TappedInterleaver._serve_if_awaited(self, place, live)
        return super()._serve_if_awaited(place, live)


class TappedFollower(Follower):
    """Another rank: does at taps what rank 0 does there."""

    tapped: bool
    one_graph: bool

    def __init__(self, *args: Any, taps: Taps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wholes: Wholes = Wholes(taps.places)
        self._taps = taps
        self._structures: dict[Place, Structure] = {}
        self._held_by_nobody = layer_outputs(self.anatomy)
        self._compiled = self._eager = self._again = False

    def begin(self, runs: Iterable[Any]) -> bool:
        super().begin(runs)
        return self._eager

    def idle(self) -> None:
        super().idle()
        self._taps.clear()

    def faults(self) -> Sequence[float]:
        return _worst(self._taps, self._group, self._device)

    def open(self, rows: RowsOf) -> None:
        super().open(rows)
        for place in self._rewritten:
            self._watch(place)

    def open_compiled(self, rows: RowsOf, spans: Spans) -> None:
        self.rows = rows
        self._taps.lay(rows, spans)
        self._open = self._compiled = True
        self._called.clear()
        self._reached = 0

    def pass_by(self, place: Place, floating: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        if not self._compiled or self.calls.running or not self._is_awaited(place):
            return
        live = self._structures[place].filled(floating, others)
        left = self._serve_if_awaited(place, live)
        if left is not live and place in self._held_by_nobody:
            put_in_place(left, floating)

    def after_compiled(self) -> bool:
        self._again = False
        self.follow()
        self._compiled = False
        return self._again

    def close(self) -> None:
        self._compiled = False
        super().close()

    def _take(self, done: Done) -> None:
        super()._take(done)
        news = done.at_taps
        if isinstance(news, Begun):
            self._begin(news)
        elif isinstance(news, Passed):
            self._again, self._rewritten = news.again, news.rewritten
            self._waiting.clear()
            self._wait(news.waiting)

    def _begin(self, news: Begun) -> None:
        self.tapped, self.one_graph, self._eager = news.tapped, news.one_graph, news.eager
        self._rewritten = news.rewritten
        if not self.tapped:
            self._taps.clear()
        elif news.plan is not None:
            self._taps.follow(news.plan)
            self._taps.share(news.plan, self._group.broadcast)

    def _watch(self, place: Place) -> None:
        if not self._compiled:
            super()._watch(place)

    def _gathered(self, place: Place, live: Any) -> Gathered | LocationError:
        if self._compiled:
            return gathered_whole(live)
        gathered = super()._gathered(place, live)
        self.wholes.note(place, gathered)
        if place in self.wholes and place not in self._structures:
            self._structures[place] = Structure(live)
        return gathered


def _worst(taps: Taps, group: Group, device: torch.device) -> list[float]:
    """By all ranks. Where one can't tell, its tables are off by more than anything."""
    try:
        mine = list(taps.faults())
    except Exception:
        mine = [float("inf")] * len(taps.places)
    of_all = group.gather(torch.tensor(mine, device=device))
    return torch.stack(of_all).amax(0).tolist()
