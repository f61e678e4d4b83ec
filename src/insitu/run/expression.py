"""What a block makes of a row before the row is there, as far as a table in a graph can make it of the row too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from insitu.run.affine import Affine


class Row(NamedTuple):
    """``affine`` of the row that the model has there."""

    affine: Affine
    dtype: torch.dtype


class Weighted(NamedTuple):
    """A row times a vector, element by element."""

    affine: Affine
    dtype: torch.dtype
    vector: torch.Tensor


class Along(NamedTuple):
    """The product of a row with a vector: ``times`` that number."""

    affine: Affine
    dtype: torch.dtype
    vector: torch.Tensor
    times: float


Expression = Row | Weighted | Along
Operand = Expression | torch.Tensor | float | None
"""A tensor is one vector as wide as the row; None is anything else."""


def made_of(what: str, *operands: Operand) -> Expression | None:
    """What an operation gives of operands of which one at least is an expression; None for what no table can do.
    ``rows`` are all, of which there is one, ``sum`` goes along it, and ``unsqueeze`` is of numbers."""
    match what, operands:
        case "neg", (Row() | Weighted() | Along() as value,):
            return _scaled(value, -1.0)
        case "float", (Row() | Weighted() | Along() as value,):
            return value._replace(dtype=torch.float32)
        case ("rows", (Row() as value,)) | ("unsqueeze", (Along() as value,)):
            return value
        case "sum", (Weighted() as value,):
            return Along(value.affine, value.dtype, value.vector, 1.0)
        case _, (left, right):
            return _combined(what, left, right)
        case _:
            return None


def product(value: Operand, other: torch.Tensor, of: Callable[[torch.Tensor], Operand]) -> Expression | None:
    """That of a row with a vector or a column, or of numbers, one below the other, with a row; ``of`` says what a
    tensor is as an operand."""
    column = other.dim() == 2 and other.shape[1] == 1
    if isinstance(value, Along):
        return made_of("matmul", value, of(other)) if other.dim() == 2 else None
    return made_of("matmul", value, of(other[:, 0] if column else other)) if column or other.dim() == 1 else None


def _combined(what: str, left: Operand, right: Operand) -> Expression | None:
    match what, left, right:
        case "add" | "sub", Row(), _:
            return _sum(left, right, 1.0 if what == "add" else -1.0)
        case "add", _, Row():
            return _sum(right, left, 1.0)
        case "sub", _, Row():
            return _sum(_scaled(right, -1.0), left, 1.0)
        case "mul", Row() | Weighted() | Along(), float():
            return _scaled(left, right)
        case "mul", float(), Row() | Weighted() | Along():
            return _scaled(right, left)
        case "truediv", Row() | Weighted() | Along(), float():
            return _scaled(left, 1 / right) if right else None
        case "mul", Row() | Along(), torch.Tensor():
            return _stretched(left, right)
        case "mul", torch.Tensor(), Row() | Along():
            return _stretched(right, left)
        case "matmul", Row(), torch.Tensor():
            return Along(left.affine, left.dtype, right, 1.0) if left.dtype == right.dtype else None
        case "matmul", Along(), torch.Tensor():
            return _stretched(left, right) if left.dtype == right.dtype else None
        case _:
            return None


def _scaled(value: Any, factor: float) -> Any:
    if not factor:  # of what is not finite, zero times it is not zero
        return None
    if isinstance(value, Along):
        return value._replace(times=value.times * factor)
    affine = Affine(value.affine)
    affine.multiply(factor)
    return value._replace(affine=affine)


def _sum(row: Row | None, other: Operand, times: float) -> Row | None:
    if row is None:
        return None
    affine, dtype = Affine(row.affine), row.dtype
    if isinstance(other, Row):
        if not affine.plus(other.affine, times):
            return None
        dtype = torch.promote_types(dtype, other.dtype)
    elif isinstance(other, (float, torch.Tensor)):
        affine.add(other, times)
        dtype = torch.promote_types(dtype, other.dtype) if isinstance(other, torch.Tensor) else dtype
    else:
        return None
    return Row(affine, dtype)


def _stretched(value: Row | Along, vector: torch.Tensor) -> Expression | None:
    dtype = torch.promote_types(value.dtype, vector.dtype)
    if isinstance(value, Row):
        return Weighted(value.affine, dtype, vector)
    affine = value.affine.product(value.vector, vector, value.times)
    return None if affine is None else Row(affine, dtype)
