"""The tensors of a value, apart from the tuples, lists and dicts that they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from insitu.block import LocationError
from insitu.run.served import map_tensors


class Tensors(NamedTuple):
    """The floating tensors of a value, which blocks edit, and the others, each in their order."""

    floating: list[torch.Tensor]
    others: list[torch.Tensor]


def tensors_in(value: Any) -> Tensors:
    """Plain enough for torch.compile to trace."""
    found = _flat(value)
    return Tensors(
        [tensor for tensor in found if tensor.is_floating_point()],
        [tensor for tensor in found if not tensor.is_floating_point()],
    )


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _flat(part)]
    return []


class Structure:
    """What a place's value looks like, tensors left out, as it was once seen.

    Raises ``LocationError`` if it holds more than tensors and constants.
    """

    def __init__(self, value: Any) -> None:
        _require_constants(value)
        found = tensors_in(value)
        self.shape: tuple[int, int] = (len(found.floating), len(found.others))
        numbers = {id(tensor): (True, i) for i, tensor in enumerate(found.floating)}
        numbers |= {id(tensor): (False, i) for i, tensor in enumerate(found.others)}
        self._value = map_tensors(value, lambda tensor: _Slot(*numbers[id(tensor)]))

    def filled(self, floating: Sequence[Any], others: Sequence[Any]) -> Any:
        """The same, of these tensors, or of what stands for them."""
        return _filled(self._value, floating, others)


class _Slot:
    def __init__(self, floating: bool, number: int) -> None:
        self.floating = floating
        self.number = number


def _filled(value: Any, floating: Sequence[Any], others: Sequence[Any]) -> Any:
    if isinstance(value, _Slot):
        return (floating if value.floating else others)[value.number]
    if isinstance(value, (tuple, list)):
        parts = [_filled(part, floating, others) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _filled(part, floating, others) for key, part in value.items()}
    return value


def _require_constants(value: Any) -> None:
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _require_constants(part)
    elif value is not None and not isinstance(value, (torch.Tensor, bool, int, float, str)):
        raise LocationError(f"its value holds a {type(value).__name__}, which a tap can't keep")
