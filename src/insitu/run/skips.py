"""What a module changed in its inputs, undone for the requests that skip it."""

from __future__ import annotations

from typing import Any

import torch

from insitu.run.served import Index, Rows, map_tensors, storage_of


class KeptRows:
    """Rows of a call's inputs as they were before it; vLLM's fused norms change theirs in place."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, Index, torch.Tensor]] = []

    def keep(self, inputs: Any, rows: Rows, fixed: frozenset[int]) -> None:
        def note(tensor: torch.Tensor) -> None:
            mine = None if storage_of(tensor) in fixed else rows.of(tensor)
            if mine is not None:
                self._kept.append((tensor, mine, tensor[mine].clone()))

        map_tensors(inputs, note)

    def put_back(self) -> None:
        for tensor, mine, before in self._kept:
            tensor[mine].copy_(before)
