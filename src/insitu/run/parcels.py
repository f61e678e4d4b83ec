"""Rows of many requests on their way to the host in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Parcel:
    """Rows of many: one tensor for each in ``hosts``, or else all in one, ``counts`` of each (None: one for each,
    without an axis for it). ``hosts`` have them since ``arrived``, or already."""

    __slots__ = ("__weakref__", "_arrived", "_counts", "_found", "_hosts", "_is_apart")

    def __init__(
        self,
        hosts: Sequence[torch.Tensor],
        counts: Sequence[int] | None,
        is_apart: bool,
        arrived: torch.cuda.Event | None = None,
    ) -> None:
        self._hosts: Sequence[torch.Tensor] = hosts
        self._arrived = arrived
        self._counts = counts
        self._is_apart = is_apart
        self._found: list[Any] | None = None

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def __reduce__(self) -> Any:
        self._wait()
        return Parcel, (self._hosts, self._counts, self._is_apart)

    def _wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def of(self, numbers: Sequence[int]) -> Parcel:
        """The rows of some, that was not taken apart. Waits until they are there."""
        self._wait()
        if self._is_apart:
            return Parcel([self._hosts[number] for number in numbers], None, is_apart=True)
        host, counts = self._hosts[0], self._counts
        if counts is None:
            return Parcel([host[list(numbers)]], None, is_apart=False)
        parts = host.split(list(counts))
        rows = torch.cat([parts[number] for number in numbers])
        return Parcel([rows], [counts[number] for number in numbers], is_apart=False)

    def take_apart(self) -> list[Any]:
        """Each request's, in memory of its own. Waits until they are there."""
        if self._found is None:
            self._wait()
            with torch.inference_mode(False):
                self._found = list(self._hosts) if self._is_apart else apart(self._hosts[0], self._counts)
            self._hosts = ()
        return self._found


def apart(tensor: torch.Tensor, counts: Sequence[int] | None) -> list[Any]:
    """Each request's rows in memory of its own."""
    copies: Any = torch.unbind_copy if counts is None else torch.split_with_sizes_copy
    return list(copies(tensor) if counts is None else copies(tensor, list(counts)))
