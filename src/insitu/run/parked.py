"""Where blocks wait, for processes that do not run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from insitu.run.block_run import BlockRun
from insitu.run.followed import Followed
from insitu.run.interleaver import Interleaver
from insitu.tree import Place


class Wait(NamedTuple):
    """How a block waits: one that ``names_source`` may ask for operations next."""

    place: Place
    skipping: bool
    names_source: bool


Parked = dict[Wait, list[str]]
"""Blocks that wait now, by how they do."""


def note_parked(parked: Parked, place: Place, run: Any) -> None:
    parked.setdefault(Wait(place, run.skipping, run.names_source), []).append(run.request)


class Telling(Interleaver):
    """Runs the blocks, and notes in its ``_news`` what others need to know of where they wait."""

    _news: Any

    def _park(self, run: BlockRun) -> None:
        super()._park(run)
        place = run.waiting
        if place is not None and run in self._waiting.get(place, ()):
            note_parked(self._news.parked, place, run)

    def _withdraw(self, run: BlockRun) -> None:
        super()._withdraw(run)
        self._news.withdrawn.append(run.request)


class Told(Interleaver):
    """Has for each run a shadow, which waits where that does."""

    shadow: Callable[[str], Any]
    _shadows: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.company: Followed = Followed(self.shadow)

    def _drop_withdrawn(self, withdrawn: list[str]) -> None:
        for request in withdrawn:
            for place, waiting in list(self._waiting.items()):
                self._waiting[place] = [other for other in waiting if other.request != request]

    def _wait(self, parked: Parked) -> None:
        for wait, requests in parked.items():
            if not self._comes_to(wait.place):
                continue
            for request in requests:
                shadow = self._shadows[request]
                shadow.skipping, shadow.names_source = wait.skipping, wait.names_source
                self._wait_at(wait.place, shadow)

    def _comes_to(self, place: Place) -> bool:
        """Whether this process has any part in ``place``."""
        return True
