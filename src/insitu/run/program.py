"""What a block leaves behind: its saved values and its error, ready to leave the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from insitu.run.block_run import BlockRun
from insitu.run.served import rebuilt


@dataclass
class Outcome:
    """What one run of a block left: saved values by name (or what a function returned), the names it
    was asked to export, and its error."""

    saves: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    error: BaseException | None = None


def outcome_of(run: BlockRun, saves: dict[str, Any], bound: dict[str, Any]) -> Outcome:
    """The outcome of an ended run; values saved before an error come along with it."""
    return Outcome(
        saves={name: ordinary(value) for name, value in saves.items()},
        bound=bound,
        returned=ordinary(run.returned),
        error=run.error,
    )


def ordinary(value: Any) -> Any:
    """``value`` with its tensors on the CPU, outside inference mode, and owning just their memory."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _ordinary_tensor(value)
    if kind is list or isinstance(value, tuple):
        parts = [ordinary(part) for part in value]
        same = all(a is b for a, b in zip(parts, value, strict=True))
        return value if same else rebuilt(value, parts)
    if kind is dict:
        parts = {key: ordinary(part) for key, part in value.items()}
        return value if all(parts[key] is value[key] for key in value) else parts
    return value


def _ordinary_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_inference():
        with torch.inference_mode(False):
            tensor = tensor.clone()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() and not tensor.requires_grad:
        return tensor.clone()
    return tensor
