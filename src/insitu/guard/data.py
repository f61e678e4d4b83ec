"""Which values are plain data: what Python's operators may be asked to do with."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PLAIN", "is_data"]

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, slice, type(None), type(...))


def is_data(value: Any) -> bool:
    """Whether it is a tensor, a number, a text or a container of Python's."""
    return isinstance(value, (*PLAIN, torch.Tensor, torch.dtype, torch.device))
