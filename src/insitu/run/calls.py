"""The model's own modules, applied to values of a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from insitu.run import refusals
from insitu.run.modules import ModuleTable
from insitu.run.served import map_tensors


class Calls:
    """``running`` while one is: its modules are no places then. ``beside``: what each runs in, given its
    arguments. ``apply`` is how a module is called."""

    def __init__(self, modules: ModuleTable, unembed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._modules = modules
        self._unembed = unembed
        self.running = False
        self.beside: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        self.apply: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] = self._apply

    def module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._modules.has_state(path):
            raise refusals.holds_state(path, self._modules[path])
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
