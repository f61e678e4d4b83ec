"""What a module changed in its inputs, undone for the requests that skip it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from insitu.run.served import Index, Rows, storage_of, tensors_of


class KeptRows:
    """Rows of a call's inputs as they were before it; vLLM's fused norms change theirs in place."""

    __slots__ = ("_kept",)

    def __init__(self, inputs: Any, skipping: Iterable[Rows], fixed: frozenset[int]) -> None:
        self._kept: list[tuple[torch.Tensor, Index, torch.Tensor]] = []
        for rows in skipping:
            for tensor in tensors_of(inputs):
                mine = None if storage_of(tensor) in fixed else rows.of(tensor)
                if mine is not None:
                    self._kept.append((tensor, mine, tensor[mine].clone()))

    def put_back(self) -> None:
        for tensor, mine, before in self._kept:
            tensor[mine].copy_(before)
