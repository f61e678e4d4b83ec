"""Indices of rows, made on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def index_on(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """An index on a device, for which nobody waits."""
    index = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda")
    return index.to(device, non_blocking=True)
