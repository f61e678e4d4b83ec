"""Brings many tensors from the device to the host in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from insitu.run.memory import require_memory

FEW, SMALL = 4, 2**18
_WHAT = "a tensor to be brought home"


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, dicts and tuples, however deep and whether or not they hold themselves."""
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif (type(part) in (list, dict) or isinstance(part, tuple)) and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)


def _on_a_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" and not tensor.is_meta


def brought_together(
    values: Sequence[Any], is_far: Callable[[torch.Tensor], bool] = _on_a_device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Small tensors of a device, each with its copy on the CPU: one transfer for those that are alike, such as the
    rows of one place in each step."""
    alike: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
    for each in values:
        if type(each) is torch.Tensor and is_far(each) and each.layout is torch.strided and not each.requires_grad:
            alike.setdefault((each.shape, each.dtype, each.device), {})[id(each)] = each
    for group in alike.values():
        tensors = list(group.values())
        if len(tensors) >= FEW and tensors[0].nbytes <= SMALL:
            for each in tensors:
                require_memory(each, _WHAT)
            with torch.inference_mode(False):
                copies: Any = torch.unbind_copy(torch.stack(tensors).cpu())
            yield from zip(tensors, copies, strict=True)
