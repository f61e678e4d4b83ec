"""The table of requests on a rank that follows: which have blocks beside them, and nothing of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from insitu.engine.worker.host import New, run_key
from insitu.run.followed import Followed
from insitu.run.parallel import Follower, Shadow
from insitu.run.stage_follower import StageFollower
from insitu.run.tapped_ranks import TappedFollower


class FollowingHost:
    """Stands where a ``Host`` stands on the leading rank."""

    def __init__(self, interleaver: Follower | StageFollower) -> None:
        self.interleaver = interleaver
        self.jobs: set[str] = set()
        self.company: Followed = interleaver.company
        self.eager_steps = 0
        self.plain_steps = 0
        self.tapped_steps = 0
        self._live: dict[str, list[Shadow]] = {}
        self._left: set[str] = set()
        self._by_key: dict[str, list[tuple[str, Shadow]]] = {}

    def called(self, method: str, keys: Sequence[str]) -> None:
        """The client has called a method of the leader."""
        if method == "insitu_submit":
            self.jobs.update(keys)
        if method in self.interleaver.windowed:
            self.interleaver.follow()
        if method == "insitu_taps" and isinstance(self.interleaver, TappedFollower):
            self.interleaver.faults()
        if method in ("insitu_collect", "insitu_drop"):
            for key in keys:
                self.jobs.discard(key)
                for request, shadow in self._by_key.pop(key, ()):
                    self.company.leave((request,))
                    self._live[request].remove(shadow)
                    if not self._live[request]:
                        del self._live[request]
                        self._left.discard(request)

    @property
    def is_idle(self) -> bool:
        return not self._live

    def admit(self, new: New) -> None:
        request, tag = new.request, new.tag
        if request in self._live:
            return
        runs: list[tuple[str, int | None]] = [(tag.group, number) for number in tag.edits]
        if tag.job in self.jobs:
            runs.append((tag.job, None))
        elif tag.refusal and not runs:
            runs.append((tag.group, 0))
        for key, edit in runs:
            shadow = self.interleaver.shadow(run_key(request, edit))
            self._live.setdefault(request, []).append(shadow)
            self._by_key.setdefault(key, []).append((request, shadow))

    def begin(self) -> None:
        """Is done as requests are admitted."""

    def preempted(self, requests: Iterable[str]) -> None:
        """Is the leader's business."""

    def runs(self, scheduled: Mapping[str, int]) -> dict[str, list[Shadow]]:
        over, company = self._left, self.company
        going = (each for each in scheduled if each in self._live and each not in over and each not in company)
        return {request: list(self._live[request]) for request in going}

    def tell_left(self) -> None:
        """Is the leader's business."""

    def leave_out(self) -> None:
        self._left.update(request for request in self.interleaver.left if request in self._live)
        if self.interleaver.left:
            self.company.leave(self.interleaver.left)

    def apart(self, runs: dict[str, list[Shadow]]) -> dict[str, list[Shadow]]:
        return {request: each for request, each in runs.items() if request not in self.company}

    def after_step(self, runs: Mapping[str, list[Shadow]]) -> tuple[frozenset[str], frozenset[str]]:
        return self.interleaver.ended

    def newly_edited(self, runs: Mapping[str, list[Shadow]]) -> list[str]:
        """The rank that leads tells the scheduler."""
        return []
