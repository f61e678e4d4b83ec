"""The order in which a forward visits its places, learnt once by watching one step."""

from __future__ import annotations

from collections.abc import Iterable

from insitu.tree import Place


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
        return self._visits[place][-1] if place in self._visits else 0

    def next_visit(self, place: Place, after: int) -> int:
        """Where ``place`` comes the next time; a forward may call one module twice."""
        visits = self._visits.get(place, ())
        return next((each for each in visits if each > after), self.position(place))

    def __contains__(self, place: Place) -> bool:
        return place in self._visits
