"""Which modules' calls are watched while a step lasts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class Watches:
    """``visit(module, forward, *args, **kwargs)`` is called in place of the forward of a watched module.

    It is the instance's forward that is replaced, which is no hook: vLLM's compiled classes replace ``__call__``
    and never run a module's hooks.
    """

    def __init__(self, visit: Callable[..., Any]) -> None:
        self._visit = visit
        self._watched: dict[int, tuple[torch.nn.Module, Any]] = {}

    def put_on(self, module: torch.nn.Module) -> None:
        if id(module) not in self._watched:
            self._watched[id(module)] = (module, module.__dict__.get("forward"))
            module.__dict__["forward"] = partial(self._visit, module, module.forward)

    def forward_of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Its own, watched or not."""
        forward = module.forward
        return forward.args[1] if isinstance(forward, partial) and forward.func == self._visit else forward

    def take_off(self) -> None:
        for module, own in self._watched.values():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
        self._watched.clear()
