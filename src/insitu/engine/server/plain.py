"""Saved values as JSON, for those who have no Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.run import tensors_of

_NUMBERS = 1 << 21
"""Of one answer. Each takes some twenty bytes as text, and the loop's time."""


def all_as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Saved values by name. Raises as ``as_json``, and for more numbers than an answer in JSON may have."""
    numbers = sum(each.numel() for each in tensors_of(list(values.values())))
    if numbers > _NUMBERS:
        raise ArgumentError(
            f"what was saved has {numbers} numbers, and an answer in JSON at most {_NUMBERS}: save fewer positions or "
            f"steps, or send a trace (insitu.connect), whose values come as bytes"
        )
    return {name: as_json(each, f"`{name}`") for name, each in values.items()}


def as_json(value: Any, what: str) -> Any:
    """Tensors as nested lists, and containers by their items; a number that JSON does not have is null.

    Raises ``ArgumentError``, which speaks of ``what``, for a value that JSON has no form for.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return _of_tensor(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(each, what) for each in value]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {str(key): as_json(each, what) for key, each in value.items()}
    kind = type(value).__name__
    raise ArgumentError(f"{what} is a {kind}, which JSON has no form for: save numbers, texts or tensors")


def _of_tensor(value: torch.Tensor) -> Any:
    values = value.detach().float() if value.is_floating_point() else value
    return values.tolist() if torch.isfinite(values).all() else _finite(values.tolist())


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(each) for each in values]
    return values if math.isfinite(values) else None
