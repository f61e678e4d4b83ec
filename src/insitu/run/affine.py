"""Edits of one row that keep it affine: what a table in a graph can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from insitu.run.indices import index_on


class Affine:
    """``scale`` times the row, plus ``weight`` times ``vector``, plus ``bias``: what a block's edits come to."""

    __slots__ = ("bias", "changed", "scale", "vector", "weight")

    def __init__(self) -> None:
        self.scale: float = 1.0
        self.vector: torch.Tensor | None = None
        self.weight: float = 1.0
        self.bias: float = 0.0
        self.changed: bool = False

    @property
    def vectors(self) -> Sequence[torch.Tensor]:
        return [] if self.vector is None else [self.vector]

    def is_like(self, other: Affine) -> bool:
        """Whether it comes to the same, of the same vector."""
        mine = (self.scale, self.weight, self.bias)
        return self.vector is other.vector and mine == (other.scale, other.weight, other.bias)

    def add(self, value: torch.Tensor | float, times: float = 1.0) -> None:
        self.changed = True
        if not isinstance(value, torch.Tensor):
            self.bias += value * times
        elif self.vector is None:
            self.vector, self.weight = value, times
        else:
            self.vector, self.weight = self.vector * self.weight + value * times, 1.0

    def multiply(self, factor: float) -> None:
        self.changed = True
        self.scale *= factor
        self.weight *= factor
        self.bias *= factor

    def set(self, value: torch.Tensor | float) -> None:
        self.scale, self.vector, self.weight, self.bias = 0.0, None, 1.0, 0.0
        self.add(value)

    def apply(self, row: torch.Tensor) -> None:
        """Edits the row in place."""
        if self.scale == 0:
            row.zero_()
        elif self.scale != 1:
            row.mul_(self.scale)
        if self.vector is not None:
            row.add_(self.vector.to(row), alpha=self.weight)
        if self.bias:
            row.add_(self.bias)


class AffineOfMany(Affine):
    """The same of ``count`` rows, where ``vector`` may have one of its own for each."""

    __slots__ = ("_vectors", "count")

    def __init__(self, edits: Affine, count: int) -> None:
        super().__init__()
        self.scale, self.vector, self.weight, self.bias = edits.scale, edits.vector, edits.weight, edits.bias
        self.count = count
        self._vectors: list[torch.Tensor] | None = None

    @property
    def has_own(self) -> bool:
        return self.vector is not None and self.vector.dim() == 2 and self.vector.shape[0] == self.count

    @property
    def vectors(self) -> Sequence[torch.Tensor]:
        """One for each row, or one for all; the same objects whenever they are asked for."""
        if self._vectors is None:
            given = self.vector
            self._vectors = [] if given is None else list(given.unbind()) if self.has_own else [given]
        return self._vectors

    def narrowed(self, rows: Sequence[int]) -> AffineOfMany:
        """That of these rows alone, in this order."""
        other = AffineOfMany(self, len(rows))
        if self.vector is not None and self.has_own:
            other.vector = self.vector[index_on(rows, self.vector.device)]
        return other


def as_row(value: Any, width: int, device: torch.device | None) -> torch.Tensor | float | None:
    """``value`` if it can be added to a row of ``width`` as one vector, on ``device`` if that is given, or as
    one number; None if not."""
    if type(value) is not torch.Tensor:
        return number(value)
    shape = value.shape
    if not shape or len(shape) > 2 or shape[-1] != width or (len(shape) == 2 and shape[0] != 1):
        return None
    plain = value.is_floating_point() and value.layout is torch.strided and not value.requires_grad
    return value if plain and not value.is_meta and (device is None or value.device == device) else None


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
