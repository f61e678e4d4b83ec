"""Whole tensors from what the ranks of a tensor-parallel model each have, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Group(Protocol):
    """The ranks that share one model. Each call is made by all of them."""

    rank: int
    size: int

    def send(self, message: Any) -> None:
        """By rank 0, to all others."""
        ...

    def receive(self) -> Any: ...

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's tensor, in their order; they have one shape."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Makes ``tensor`` what it is on rank 0."""
        ...


class Layout(Protocol):
    """How a tensor lies on the ranks."""

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def part(self, whole: torch.Tensor, group: Group) -> torch.Tensor:
        """This rank's part, in memory of its own."""
        ...


@dataclass(frozen=True)
class Split:
    """All axes but the first, taken as one, are cut over the ranks.

    ``segments``: what follows one another there, each a width on one rank and the number of neighbouring
    ranks that have the same part of it (keys and values, where there are fewer heads than ranks).
    """

    segments: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """On one rank."""
        return sum(width for width, _ in self.segments)

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0 and width_of(tensor) == self.width

    def fits_whole(self, tensor: torch.Tensor, size: int) -> bool:
        """Whether it may be what ``size`` ranks have together."""
        return width_of(tensor) == sum(width * (size // replicas) for width, replicas in self.segments)

    def agrees(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether ranks that should have the same do."""
        for column, replicas in zip(zip(*map(self._cut, parts), strict=True), self._replicas, strict=True):
            for i, each in enumerate(column):
                if not torch.equal(each, column[i - i % replicas]):
                    return False
        return True

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        columns = zip(*map(self._cut, parts), strict=True)
        joined = [
            torch.cat(column[::replicas], dim=-1) for column, replicas in zip(columns, self._replicas, strict=True)
        ]
        return _shaped(torch.cat(joined, dim=-1), parts[0])

    def part(self, whole: torch.Tensor, group: Group) -> torch.Tensor:
        flat = _flat(whole)
        sizes = [width * (group.size // replicas) for width, replicas in self.segments]
        mine = [
            segment.narrow(-1, group.rank // replicas * width, width)
            for segment, (width, replicas) in zip(flat.split(sizes, dim=-1), self.segments, strict=True)
        ]
        return _shaped(torch.cat(mine, dim=-1), whole)

    @property
    def _replicas(self) -> list[int]:
        return [replicas for _, replicas in self.segments]

    def _cut(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _flat(part).split([width for width, _ in self.segments], dim=-1)


@dataclass(frozen=True)
class Summed:
    """Each rank has a summand."""

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts)).sum(dim=0)

    def part(self, whole: torch.Tensor, group: Group) -> torch.Tensor:
        return whole.clone() if group.rank == 0 else torch.zeros_like(whole)


def width_of(tensor: torch.Tensor) -> int:
    """Of a row."""
    return tensor.shape[1 if tensor.dim() > 1 else 0 :].numel()


def are_equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(part, parts[0]) for part in parts[1:])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flat.reshape(like.shape[0], -1, *like.shape[2:]) if like.dim() > 2 else flat
