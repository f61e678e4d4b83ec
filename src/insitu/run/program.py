"""What a block leaves behind: its saved values and its error, ready to leave the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from insitu.block import ArgumentError, Lost
from insitu.run.block_run import BlockRun
from insitu.run.home import FEW, brought_together, tensors_within
from insitu.run.memory import require_memory
from insitu.run.sending import Sender
from insitu.run.served import rebuilt


@dataclass
class Outcome:
    """What one run of a block left: saved values by name (or what a function returned), the names it
    was asked to export, what it saved in vain, and its error. ``edit``: the number of the installed edit that it
    is of; ``sequence``: that of its request which it ran beside."""

    saves: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    error: BaseException | None = None
    lost: Sequence[Lost] = ()
    edit: int | None = None
    sequence: int = 0


def outcome_of(
    run: BlockRun,
    saves: dict[str, Any],
    bound: dict[str, Any],
    lost: Sequence[Lost] = (),
    home: Home | None = None,
) -> Outcome:
    """The outcome of an ended run; values saved before an error come along with it."""
    outcome = Outcome(bound=bound, error=run.error, lost=lost)
    home = home or Home()
    try:
        outcome.saves = {name: home.bring(value, f"`{name}`") for name, value in saves.items()}
        outcome.returned = home.bring(run.returned, "what the block returned")
    except Exception as error:
        outcome.error = outcome.error or error
    return outcome


class Home:
    """Takes values out of the engine: their tensors on the CPU, or with ``keep`` where they are, outside inference
    mode, and owning just their memory. What several values share stays shared. ``sender`` may have sent some."""

    def __init__(self, sender: Sender | None = None, keep: bool = False) -> None:
        self._keep = keep
        self._made: dict[int, tuple[Any, Any]] = {}
        self._sender = sender or _NOTHING_SENT

    def bring(self, value: Any, what: str) -> Any:
        """Raises ``ArgumentError``, which speaks of ``what``, for a value that can't be."""
        try:
            return self._ordinary(value) if any(map(self._must_change, tensors_within(value))) else value
        except RecursionError:
            raise ArgumentError(
                f"{what} is nested too deeply to be brought home: keep its tensors in a flat list or dict"
            ) from None

    def _ordinary(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)][1]
        if type(value) is list and value:
            found = self._sender.find(value)
            rest = [part for part, sent in zip(value, found, strict=True) if sent is None]
            if not rest:
                self._made[id(value)] = (value, found)
                return found
            if len(rest) < len(value):
                mine: list[Any] = []
                self._made[id(value)] = (value, mine)
                mine.extend(
                    self._ordinary(part) if sent is None else sent for part, sent in zip(value, found, strict=True)
                )
                return mine
        if type(value) is list and len(value) >= FEW and not self._keep:
            self._made.update(
                (id(old), (old, new)) for old, new in brought_together(value) if id(old) not in self._made
            )
        if type(value) in (list, dict):
            made: Any = type(value)()
            self._made[id(value)] = (value, made)  # before its parts, one of which may be itself
            if isinstance(value, list):
                made.extend(map(self._ordinary, value))
            else:
                made.update((key, self._ordinary(part)) for key, part in value.items())
            return made
        if isinstance(value, tuple):
            made = rebuilt(value, [self._ordinary(part) for part in value])
        elif isinstance(value, torch.Tensor):
            sent = self._sender.find([value])[0]
            made = self._ordinary_tensor(value) if sent is None else sent
        else:
            return value
        self._made[id(value)] = (value, made)
        return made

    def _must_change(self, tensor: torch.Tensor) -> bool:
        if _is_at_home(tensor):
            return False
        require_memory(tensor, "a tensor to be brought home")
        return not tensor.is_meta and (tensor.is_inference() or self._is_to_move(tensor) or _owns_more(tensor))

    def _is_to_move(self, tensor: torch.Tensor) -> bool:
        return not self._keep and tensor.device.type != "cpu"

    def _ordinary_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_inference():
            with torch.inference_mode(False):
                tensor = tensor.clone()
        if self._is_to_move(tensor):
            return tensor.cpu()
        return tensor.clone() if _owns_more(tensor) else tensor


_NOTHING_SENT = Sender(lambda tensor: False)


def _is_at_home(tensor: torch.Tensor) -> bool:
    """Whether it is sure, at little cost, that a tensor is as it is to leave the engine."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    whole = tensor.is_contiguous() and not tensor.storage_offset() and not tensor.is_inference()
    return whole and tensor.untyped_storage().nbytes() == tensor.nbytes


def _owns_more(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.requires_grad:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
