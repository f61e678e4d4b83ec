"""Requests whose blocks are run as one, and each of them as a host sees a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import count
from typing import Any

from insitu.block import Lost
from insitu.run import BlockRun, Interleaver, Outcome, Rows
from insitu.run.packed import OtherKindError
from insitu.run.posting import Post
from insitu.run.shares import Left
from insitu.run.spread import rows_of_all
from insitu.run.together import Together


class Cohort:
    """Requests that are in the same step of theirs, run as one beside the rows of all."""

    def __init__(self, together: Together, interleaver: Interleaver, owner: object, lost: Sequence[Lost]) -> None:
        self.together = together
        self.lost = lost
        self.members: dict[str, Member] = {}
        self.told: tuple[str, ...] = ()
        """The requests, as other ranks know them."""
        self._interleaver = interleaver
        self.leader: BlockRun = BlockRun(together, interleaver)
        self.leader.request = f"together/{next(_numbers)}"
        self.leader.owner = owner
        self.leader.rows = _MANY
        self.leader.many = together

    def join(self, member: Member) -> None:
        member.cohort = self
        self.members[member.request] = member
        self.together.names[member.number] = member.request

    def part(self, leaving: Iterable[Member]) -> Cohort:
        """These requests by themselves, to go on where all are: they are over, or not in a step that others are in."""
        leaving = list(leaving)
        numbers = {member.number for member in leaving}
        order = tuple(number for number in self.together.members if number in numbers)
        other = Cohort(self.together.parted(order), self._interleaver, self.leader.owner, self.lost)
        other.leader.step, other.leader.steps = self.leader.step, self.leader.steps
        other.leader.edited = self.leader.edited
        for member in leaving:
            del self.members[member.request]
            other.join(member)
        return other

    def absent(self, scheduled: Set[str]) -> list[Member]:
        """Those whose requests are not among these."""
        if scheduled >= self.members.keys():
            return []
        return [member for request, member in self.members.items() if request not in scheduled]

    def leave(self, member: Member) -> None:
        """The request is of no concern any more."""
        self.members.pop(member.request, None)
        if not self.members:
            self.leader.kill()
            self.leader.let_go()
            self.together.let_go()
        elif not self.leader.done:
            self.together.go_on_without((member.number,))

    def finish(self, result: Any) -> None:
        """The requests of all have ended."""
        if not self.leader.started:
            self._interleaver.resume(self.leader)
        self._interleaver.finish(self.leader, result)

    def settle(self, spans: Mapping[str, tuple[int, int]], total: int) -> Rows | None:
        """The rows of all, whose requests have these spans of a step's; None if some have none, as where prompts are
        given by embeddings."""
        found = [(spans[request], member.number) for request, member in self.members.items() if request in spans]
        if not found or len(found) != len(self.members):
            return None
        rows = rows_of_all(found, total, next(self._interleaver.modules.root.parameters()).device)
        if rows.members != self.together.members:
            self.together.members = rows.members
        self.together.counts = rows.counts
        return rows

    def error(self, number: int) -> BaseException | None:
        error = self.leader.error
        if isinstance(error, OtherKindError):
            kinds = self._interleaver.kinds
            kinds.update(dict.fromkeys(kinds))  # nothing is known for sure any more
        return None if error is None else self.together.error_like(error, number)


_numbers = count()
_MANY = 2
"""Rows; how many more does not matter."""


class Member:
    """One request of a cohort, where a host has the run and the execution of its block. ``number``: among those that
    have begun with it."""

    order = 0
    started = True
    stopping = False
    skipping = False
    names_source = False
    waiting = None
    recorders: Sequence[Any] = ()

    __slots__ = ("__weakref__", "_error", "about", "beside", "cohort", "number", "request")

    def __init__(self, cohort: Cohort, about: Any) -> None:
        self.cohort: Cohort = cohort
        self.about: Any = about
        self.request: str = about.request
        self.number: int = len(cohort.members)
        self.beside: list[Any] = []
        self._error: BaseException | None = None
        cohort.join(self)

    @property
    def done(self) -> bool:
        return self._error is not None or self.cohort.leader.done

    @property
    def edited(self) -> bool:
        return self.cohort.leader.edited

    @property
    def error(self) -> BaseException | None:
        if self._error is None and self.cohort.leader.error is not None:
            self._error = self.cohort.error(self.number)
        return self._error

    @property
    def returned(self) -> Any:
        return self._left.returned(self.number)

    def refuse(self, error: BaseException) -> None:
        if self.error is None:
            self._error = error
            self.cohort.leave(self)

    def throw(self, error: BaseException) -> None:
        if not self.done:
            self.refuse(error)

    def kill(self) -> None:
        if not self.done:
            self.cohort.leave(self)
        self.let_go()

    def let_go(self) -> None:
        """What it left is taken."""
        self._left.release(self.number)
        if self.done:
            self.cohort.leave(self)

    @property
    def _left(self) -> Left:
        return self.cohort.together.shares.left

    def saved(self) -> dict[str, Any]:
        return {} if self._error is not None else self._left.saves(self.number)

    def outcome(self, post: Post | None) -> Outcome:
        """``post``: what takes it to another process."""
        error = self.error
        if error is not None:
            return Outcome({}, returned=None, error=error, lost=())
        if post is not None:
            return post.take(self._left, self.number, self.cohort.lost)
        return Outcome(self.saved(), returned=self.returned, error=None, lost=self.cohort.lost)
