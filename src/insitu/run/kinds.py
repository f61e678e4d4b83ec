"""What values are like, as far as running blocks together goes: which of their axes goes by tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from insitu.run.served import Rows, storage_of


@dataclass(frozen=True)
class ByRows:
    """A tensor that goes by tokens, or by ``each`` request without an axis for tokens, as a request sees it. ``like``:
    the shape of a token's, and the dtype, where a place was last seen to hold one."""

    dims: int
    each: bool = False
    like: tuple[tuple[int, ...], torch.dtype] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Constant:
    """A part of a place's value that is no tensor."""

    value: Any


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text and the like, which is the same for all whoever holds it."""
    return type(value) in _PLAIN


def leaves(kind: Any) -> list[Any]:
    """The kinds of the tensors in a value; None for one that does not go by tokens."""
    if isinstance(kind, Constant):
        return []
    if isinstance(kind, ByRows) or kind is None:
        return [kind]
    return [leaf for part in (kind.values() if isinstance(kind, dict) else kind) for leaf in leaves(part)]


def kind_of(value: Any, rows: Rows, fixed: frozenset[int]) -> Any:
    """What a place's value is like, of which a request has these rows; ``fixed`` as for ``Served``."""
    if isinstance(value, torch.Tensor):
        if storage_of(value) in fixed or rows.of(value) is None:
            return None
        return ByRows(value.dim(), like=(tuple(value.shape[1:]), value.dtype))
    if type(value) in (tuple, list):
        return type(value)(kind_of(part, rows, fixed) for part in value)
    if type(value) is dict:
        return {key: kind_of(part, rows, fixed) for key, part in value.items()}
    return Constant(value) if is_plain(value) else None


_PLAIN = (int, float, bool, str, type(None), slice, range, torch.dtype)
