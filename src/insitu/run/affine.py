"""Edits of one row that keep it affine: what a table in a graph can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from insitu.run.indices import index_on

_VECTORS = ("vector", "along", "onto")
_FIELDS = (*_VECTORS, "scale", "weight", "bias", "turn")


class Affine:
    """What a block's edits of a row come to: ``scale`` times the row, plus ``turn`` times its product with ``along``
    times ``onto``, plus ``weight`` times ``vector``, plus ``bias``."""

    __slots__ = _FIELDS

    def __init__(self, like: Affine | None = None) -> None:
        self.scale: float = 1.0
        self.vector: torch.Tensor | None = None
        self.weight: float = 1.0
        self.bias: float = 0.0
        self.along: torch.Tensor | None = None
        self.onto: torch.Tensor | None = None
        self.turn: float = 0.0
        if like is not None:
            self.become(like)

    def become(self, other: Affine) -> None:
        for name in _FIELDS:
            setattr(self, name, getattr(other, name))

    @property
    def groups(self) -> tuple[Sequence[torch.Tensor], ...]:
        """What is added, what the row is multiplied with and what that stretches: none, one, or one for each row."""
        return tuple([] if each is None else [each] for each in (self.vector, self.along, self.onto))

    @property
    def vectors(self) -> list[torch.Tensor]:
        return [vector for group in self.groups for vector in group]

    @property
    def factors(self) -> tuple[float, float, float, float]:
        return self.scale, self.weight, self.bias, self.turn

    def is_like(self, other: Affine) -> bool:
        """Whether it comes to the same, of the same vectors."""
        same = self.vector is other.vector and self.along is other.along and self.onto is other.onto
        return same and self.factors == other.factors

    def add(self, value: torch.Tensor | float, times: float = 1.0) -> None:
        if not isinstance(value, torch.Tensor):
            self.bias += value * times
        elif self.vector is None:
            self.vector, self.weight = value, times
        else:
            self.vector, self.weight = self.vector * self.weight + value * times, 1.0

    def multiply(self, factor: float) -> None:
        self.scale *= factor
        self.weight *= factor
        self.bias *= factor
        self.turn *= factor

    def set(self, value: torch.Tensor | float) -> None:
        self.become(Affine())
        self.scale = 0.0
        self.add(value)

    def plus(self, other: Affine, times: float) -> bool:
        """Adds what another makes of the same row. False if that is not of this form."""
        scale = self.scale + times * other.scale
        if (self.along is not None and other.along is not None) or (scale == 0 and (self.scale or other.scale)):
            return False  # of what is not finite, nothing times it is not zero
        self.scale = scale
        if other.along is not None:
            self.along, self.onto, self.turn = other.along, other.onto, other.turn * times
        if other.vector is not None:
            self.add(other.vector, other.weight * times)
        self.bias += other.bias * times
        return True

    def product(self, along: torch.Tensor, onto: torch.Tensor, times: float) -> Affine | None:
        """``times`` its product with ``along``, times ``onto``. None if that is not of this form."""
        if self.along is not None:
            return None
        made = Affine()
        made.scale = 0.0
        if self.scale:
            made.along, made.onto, made.turn = along, onto, times * self.scale
        if self.vector is not None or self.bias:
            fixed: Any = self.bias
            if self.vector is not None:
                fixed = self.vector.to(along.device, torch.float32) * self.weight + self.bias
            made.vector = (along.float() * fixed).sum(-1, keepdim=True) * onto * times
        return made

    def apply(self, row: torch.Tensor) -> None:
        """Edits the row in place."""
        if self.along is not None and self.onto is not None:
            given = row.float()
            turned = (given * self.along.to(given)).sum(-1, keepdim=True) * self.turn * self.onto.to(given)
            row.copy_(turned + given * self.scale if self.scale else turned)
        elif self.scale == 0:
            row.zero_()
        elif self.scale != 1:
            row.mul_(self.scale)
        if self.vector is not None:
            row.add_(self.vector.to(row), alpha=self.weight)
        if self.bias:
            row.add_(self.bias)


class AffineOfMany(Affine):
    """The same of ``count`` rows, each of which may have vectors of its own."""

    __slots__ = ("_groups", "count")

    def __init__(self, edits: Affine, count: int) -> None:
        super().__init__(edits)
        self.count = count
        self._groups: tuple[Sequence[torch.Tensor], ...] | None = None

    def _is_own(self, vector: torch.Tensor) -> bool:
        return vector.dim() == 2 and vector.shape[0] == self.count

    @property
    def groups(self) -> tuple[Sequence[torch.Tensor], ...]:
        """The same objects whenever they are asked for."""
        if self._groups is None:
            self._groups = tuple(
                list(group[0].unbind()) if group and self._is_own(group[0]) else group for group in super().groups
            )
        return self._groups

    def narrowed(self, rows: Sequence[int]) -> AffineOfMany:
        """That of these rows alone, in this order."""
        other = AffineOfMany(self, len(rows))
        for name in _VECTORS:
            vector = getattr(self, name)
            if vector is not None and self._is_own(vector):
                setattr(other, name, vector[index_on(rows, vector.device)])
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
