"""Rows of many requests on their way to the host in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

_PIECE = 2**23
"""Bytes of what is copied at once and let go at once: what each costs is 40 us on an H200's host, whatever its size."""


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


def pieces_of(
    tensor: torch.Tensor, counts: Sequence[int] | None
) -> Iterator[tuple[torch.Tensor, Sequence[int] | None]]:
    """All rows in some pieces of about ``_PIECE`` bytes, and at least one request's, with how many rows each has."""
    lengths = [1] * tensor.shape[0] if counts is None else counts
    row = tensor[:1].nbytes
    start = end = first = 0
    for number, length in enumerate(lengths):
        if end > start and (end + length - start) * row > _PIECE:
            yield tensor[start:end], None if counts is None else lengths[first:number]
            start, first = end, number
        end += length
    yield tensor[start:end], None if counts is None else lengths[first:]


class _Held(np.ndarray[Any, Any]):
    """The bytes of a tensor, which stays as long as they do."""


def carved(memory: torch.Tensor, counts: Sequence[int] | None) -> list[torch.Tensor]:
    """As ``apart``, without copies: storages of their own in the same memory, which stays as long as any does."""
    raw: Any = memory.reshape(-1).view(torch.uint8).numpy().view(_Held)
    raw.holder = memory  # which is counted as in use until it goes
    rest, size = memory.shape[1:], memory.element_size()
    found: list[torch.Tensor] = []
    at = 0
    with torch.inference_mode(False):
        for shape in [rest] * len(memory) if counts is None else [(count, *rest) for count in counts]:
            count = prod(shape)
            own = torch.frombuffer(raw, dtype=memory.dtype, count=count, offset=at) if count else memory.new_empty(0)
            found.append(own.resize_(shape))  # no view
            at += count * size
    return found


def apart(tensor: torch.Tensor, counts: Sequence[int] | None) -> list[Any]:
    """Each request's rows in memory of its own."""
    copies: Any = torch.unbind_copy if counts is None else torch.split_with_sizes_copy
    return list(copies(tensor) if counts is None else copies(tensor, list(counts)))
