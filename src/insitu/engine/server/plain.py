"""Saved values as JSON, for those who have no Python."""

from __future__ import annotations

import math
from typing import Any

import torch

from insitu.block import ArgumentError


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
