"""The table of requests on a rank that follows: which are traced, and nothing of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from insitu.run.parallel import Follower, Shadow


class FollowingHost:
    """Stands where a ``Host`` stands on the leading rank."""

    def __init__(self, interleaver: Follower) -> None:
        self.interleaver = interleaver
        self.jobs: set[str] = set()
        self.eager_steps = 0
        self.plain_steps = 0
        self.tapped_steps = 0
        self._live: dict[str, Shadow] = {}
        self._by_job: dict[str, list[str]] = {}

    def called(self, method: str, jobs: Sequence[str]) -> None:
        """The client has called a method of the leader that changes which requests are traced."""
        if method == "insitu_submit":
            self.jobs.update(jobs)
        if method == "insitu_collect":
            self.interleaver.follow()
        if method in ("insitu_collect", "insitu_drop"):
            for job in jobs:
                self.jobs.discard(job)
                for request in self._by_job.pop(job, ()):
                    del self._live[request]

    def admit(self, request: str, job: str, *_: Any) -> None:
        if job in self.jobs and request not in self._live:
            self._live[request] = Shadow(request)
            self._by_job.setdefault(job, []).append(request)

    def preempted(self, requests: Iterable[str]) -> None:
        """Is the leader's business."""

    def runs(self, requests: Iterable[str]) -> dict[str, Shadow]:
        return {request: self._live[request] for request in requests if request in self._live}

    def ended(self, requests: Iterable[str]) -> frozenset[str]:
        return frozenset()

    def released(self, requests: Iterable[str]) -> frozenset[str]:
        return frozenset()
