"""The model's own modules, applied to values of a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.run import refusals
from insitu.run.modules import ModuleTable
from insitu.run.served import map_tensors, tensors_of


class Calls:
    """``running`` while one is: its modules are no places then. ``beside``: what each runs in, given its
    arguments. ``apply`` is how a module is called."""

    def __init__(self, modules: ModuleTable, unembed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._modules = modules
        self._unembed = unembed
        self.running: bool = False
        self.beside: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        self.apply: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] = self._apply

    def module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._modules.has_state(path):
            raise refusals.holds_state(path, self._modules[path])
        _require_fits(path, self._modules[path], tensors_of((args, kwargs)))
        return self._run(partial(self.apply, path, args, kwargs), (args, kwargs))

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._run(partial(self._unembed, hidden), hidden)

    def _apply(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._modules[path](*args, **kwargs)

    def _run(self, compute: Callable[[], Any], given: Any) -> Any:
        running, self.running = self.running, True
        try:
            with self.beside(given), torch.inference_mode():
                value = compute()
        finally:
            self.running = running
        return map_tensors(value, torch.clone)


def _require_fits(path: str, module: torch.nn.Module, given: list[torch.Tensor]) -> None:
    """Kernels of norms trust the shapes that they are given, and on a GPU those of embeddings the ids."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return
    if weight.dim() == 1 and "norm" in type(module).__name__.lower():
        wrong = next((each for each in given if each.shape[-1:] != weight.shape or each.shape != given[0].shape), None)
        if wrong is not None:
            raise ArgumentError(
                f"`{path}` is called with tensors of one shape, {weight.shape[0]} wide; got {tuple(wrong.shape)}"
            )
    rows: Any = getattr(module, "num_embeddings", None)
    for ids in given if isinstance(rows, int) else ():
        if ids.numel() and not ids.is_floating_point() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            raise ArgumentError(f"`{path}` is called with ids from 0 to {rows - 1}")
