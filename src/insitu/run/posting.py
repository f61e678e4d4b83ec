"""What many requests leave, on its way to another process in one message: the rows of all in one, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.block import Lost
from insitu.run.program import Outcome
from insitu.run.shares import Left


class Post:
    """One message."""

    def __init__(self) -> None:
        self._shares: dict[int, _Share] = {}

    def take(self, left: Left, member: int, lost: Sequence[Lost]) -> Outcome:
        """The outcome of one of the requests that have left it, to be pickled once all are taken."""
        share = self._shares.setdefault(id(left), _Share(left))
        share.members.append(member)
        return _Posted(share, member, lost)


class _Share:
    """What is left for the requests of one message."""

    def __init__(self, left: Left) -> None:
        self.members: list[int] = []
        self._left = left

    def __reduce__(self) -> Any:
        return self._left.of(self.members).__reduce__()


class _Posted(Outcome):
    """Becomes an ordinary outcome where it arrives."""

    def __init__(self, share: _Share, member: int, lost: Sequence[Lost]) -> None:
        super().__init__(lost=lost)
        self._share = share
        self._member = member

    def __reduce__(self) -> Any:
        return _arrived, (self._share, self._member, self.lost, self.edit, self.sequence)


def _arrived(left: Left, member: int, lost: Sequence[Lost], edit: int | None, sequence: int) -> Outcome:
    saves, returned = left.saves(member), left.returned(member)
    return Outcome(saves, returned=returned, lost=lost, edit=edit, sequence=sequence)
