"""Requests that have one run on the rank that leads, as a rank that follows knows them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Set
from typing import Any

import torch

from insitu.run.served import Rows
from insitu.run.spread import rows_of_all

News = Mapping[str, Mapping[str, int]]
"""For which requests runs stand, by the run's name; each with its number there."""


class Followed:
    """Stands where a ``Company`` stands on the leading rank, and knows what that has told."""

    def __init__(self, shadow: Callable[[str], Any]) -> None:
        self.shadows: dict[str, Any] = {}
        """By the name of the run."""
        self._make = shadow
        self._requests: dict[str, dict[str, int]] = {}
        self._names: dict[str, str] = {}
        self._changes = 0

    def __contains__(self, request: str) -> bool:
        return request in self._names

    def tell(self, news: News) -> None:
        """These runs stand for these requests from now on."""
        self.leave([request for name in news for request in self._requests.get(name, ())])
        for name, requests in news.items():
            self.leave(requests)
            self.shadows[name] = self._make(name)
            self._requests[name] = dict(requests)
            self._names.update(dict.fromkeys(requests, name))

    def leave(self, requests: Iterable[str]) -> None:
        """No run stands for these."""
        self._changes += 1
        for request in requests:
            name = self._names.pop(request, None)
            if name is not None:
                mine = self._requests[name]
                del mine[request]
                if not mine:
                    del self._requests[name], self.shadows[name]

    def leaders(self, scheduled: Container[str]) -> list[Any]:
        """The shadows of runs that may be in a step: whether they are is told when it has begun."""
        found = self._requests.items()
        return [self.shadows[name] for name, mine in found if any(request in scheduled for request in mine)]

    def settle(self, rows: dict[Any, Rows], spans: Mapping[str, Any], total: int) -> int:
        """As a company does; which rows they are is of no concern here."""
        rows.update((self.shadows[name], Rows(0, total, total)) for name in self._here(spans.keys()))
        return self._changes

    def _here(self, requests: Set[str]) -> list[str]:
        """The runs all of whose requests are among these."""
        return [name for name, mine in self._requests.items() if mine.keys() <= requests]

    def is_as(self, settled: int) -> bool:
        return settled == self._changes


class FollowedRows(Followed):
    """Knows the rows of each run, too, as they lie on a ``device`` of its own."""

    def __init__(self, shadow: Callable[[str], Any], device: torch.device) -> None:
        super().__init__(shadow)
        self._device = device

    def settle(self, rows: dict[Any, Rows], spans: Mapping[str, Any], total: int) -> int:
        for name in self._here(spans.keys()):
            mine = [(spans[request], number) for request, number in self._requests[name].items()]
            rows[self.shadows[name]] = rows_of_all(mine, total, self._device)
        return self._changes
