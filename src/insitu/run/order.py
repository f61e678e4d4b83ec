"""The order in which a forward visits its places, learnt once by watching one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from insitu.run import refusals
from insitu.tree import LOGITS, RESULT, SAMPLES, Place

if TYPE_CHECKING:
    from insitu.run.block_run import BlockRun


class VisitOrder:
    """When each place comes in a step, as a number that grows along the step, and inside which calls.

    The number makes a read of a place that has gone by an error at once, on the line that reads. The
    calls are those to watch as well: a block that waits inside a module may ask for its output next,
    and a call that has begun unwatched can't be caught any more.
    """

    def __init__(self) -> None:
        self._visits: dict[Place, list[int]] = {}
        self._calls: dict[Place, tuple[str, ...]] = {}
        self._count = 0
        self.complete = False

    def restart(self) -> None:
        """Forgets what was seen, if it was not a whole step."""
        if not self.complete:
            self._visits.clear()
            self._calls.clear()
            self._count = 0

    def arrive(self, place: Place, calls: Iterable[str]) -> None:
        """Notes a visit, inside these calls, while the order is being learnt."""
        if not self.complete:
            self._count += 1
            self._visits.setdefault(place, []).append(self._count)
            self._calls[place] = tuple(calls)

    def calls(self, place: Place) -> tuple[str, ...]:
        """Paths of the modules whose calls are in progress at ``place``, outermost first."""
        return self._calls.get(place, ())

    def position(self, place: Place) -> int:
        """Where ``place`` comes in a step, the last time as far as it has been seen; 0 if it has not."""
        return self._visits.get(place, _NEVER)[-1]

    def next_visit(self, place: Place, after: int) -> int:
        """Where ``place`` comes the next time; a forward may call one module twice."""
        visits = self._visits.get(place, _NEVER)
        if visits[0] > after or len(visits) == 1:
            return visits[0]
        return next((each for each in visits if each > after), visits[-1])

    def __contains__(self, place: Place) -> bool:
        return place in self._visits


def require_to_come(run: BlockRun, place: Place, order: VisitOrder, learning: bool) -> None:
    """Raises if the block, where it is in its step, has left ``place`` behind. ``learning``: the order is that of the
    forward in progress, so that all in it has gone by."""
    if run.at == RESULT:
        raise refusals.after_result(place)
    skipped = next((each for each in run.skipped if place.is_inside(each)), None)
    if skipped is not None:
        raise refusals.inside_skipped(place, skipped)
    if place in TAIL:
        late = run.at is not None and run.at in TAIL and TAIL.index(place) <= TAIL.index(run.at)
    else:
        end = place.at("output").module if place.op else place
        late = run.at in TAIL or 0 < order.position(end) <= run.position
        late = late or (learning and run.in_step and end in order)
    if late:
        raise refusals.gone_by(place, run.at)


_NEVER = [0]

TAIL = (LOGITS, SAMPLES, RESULT)
"""What comes after the forward, in order."""
