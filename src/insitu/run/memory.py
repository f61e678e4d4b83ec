"""Tensors whose memory was taken away from under them: reading one would end the process."""

from __future__ import annotations

import torch

from insitu.block import WriteError


def require_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises ``WriteError``, which speaks of ``what``, if the storage was resized to less than the tensor needs."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
    needed, there = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if there < needed:
        raise WriteError(
            f"{what} {tuple(tensor.shape)} has {there} bytes of memory of the {needed} that it needs: its storage was "
            f"resized. Assign another tensor instead, or cut rows off with an index"
        )
