"""Keeps torch's per-thread state of a block and of the forward apart.

Greenlets share their thread, and torch keeps inference mode, grad mode, autocast and the stack of
modes per thread. Without this a block that waits inside ``with torch.autocast(...)`` would put the
whole batch under autocast. The handler of warnings is one more (``warning_handlers``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from insitu.run import unwinding, warning_handlers  # noqa: F401 the first is needed for what it does

# What torch.inference_mode itself is built on, at a quarter of its cost per switch.
_InferenceMode: Any = torch._C._InferenceMode
_stack_depth: Callable[[], int] = torch._C._len_torch_function_stack
_pop_mode: Callable[[], TorchFunctionMode] = torch._C._pop_torch_function_stack
_push_mode: Callable[[TorchFunctionMode], None] = torch._C._push_on_torch_function_stack


class BlockState:
    """Inside ``with BlockState():`` the thread is in the state in which blocks begin, so that to run many of
    them, one after another, costs little. Inference mode is off in it, and gradients."""

    now: tuple[str, tuple[bool, torch.dtype], torch.dtype, int] | None = None

    def __enter__(self) -> None:
        device = _autocast_device()
        self._mode = _InferenceMode(False)
        self._mode.__enter__()
        torch._C._set_grad_enabled(False)
        self._handler = warning_handlers.taken()
        self._before = BlockState.now
        BlockState.now = (device, _autocast(device), torch.get_default_dtype(), _stack_depth())

    def __exit__(self, *error: Any) -> None:
        BlockState.now = self._before
        warning_handlers.put(self._handler)
        self._mode.__exit__(*error)


class TorchState:
    """The state of one block, put in place whenever the block runs."""

    __slots__ = ("_autocast", "_dtype", "_grad", "_handler", "_is_first", "_modes")

    def __init__(self) -> None:
        self._grad = False
        self._autocast: tuple[bool, torch.dtype] | None = None
        self._dtype: torch.dtype | None = None
        self._modes: list[TorchFunctionMode] = []
        self._handler: int | None = None
        self._is_first = True

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """``step(*args)`` with the block's state in place of the forward's.

        Inference mode is off in a block, so that what it holds are ordinary tensors; gradients
        are off until the block turns them on.
        """
        if BlockState.now is not None:
            return self._run_in(BlockState.now, step, args)
        device = _autocast_device()
        outer = (_autocast(device), torch.get_default_dtype(), _stack_depth())
        handler = warning_handlers.taken()
        with _InferenceMode(False):
            torch._C._set_grad_enabled(self._grad)
            self._restore(device)
            try:
                return self._with_handler(step, args)
            finally:
                self._grad = torch.is_grad_enabled()
                self._keep(device, *outer)
                self._is_first = False
                warning_handlers.put(handler)

    def _run_in(self, now: tuple[Any, ...], step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        device, autocast, dtype, depth = now
        if not self._is_first:
            torch._C._set_grad_enabled(self._grad)
            self._restore(device)
        try:
            return self._with_handler(step, args)
        finally:
            untouched = not torch.is_grad_enabled() and torch.is_autocast_enabled(device) == autocast[0]
            if not (self._is_first and untouched and _stack_depth() == depth and torch.get_default_dtype() is dtype):
                self._grad = torch.is_grad_enabled()
                self._keep(device, autocast, dtype, depth)
                self._is_first = not self._grad and self._autocast is None and self._dtype is None and not self._modes
                torch._C._set_grad_enabled(False)

    def _with_handler(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._handler is not None:
            warning_handlers.put(self._handler)
            self._handler = None
        try:
            return step(*args)
        finally:
            if (left := warning_handlers.present()) != warning_handlers.OF_NOBODY:
                self._handler = left  # it waits inside a function
                warning_handlers.put(None)

    def _restore(self, device: str) -> None:
        if self._autocast is not None:
            _set_autocast(device, self._autocast)
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        while self._modes:
            _push_mode(self._modes.pop())

    def _keep(self, device: str, autocast: tuple[bool, torch.dtype], dtype: torch.dtype, depth: int) -> None:
        now = _autocast(device)
        self._autocast = now if now != autocast else None
        if self._autocast is not None:
            _set_autocast(device, autocast)
        self._dtype = torch.get_default_dtype() if torch.get_default_dtype() != dtype else None
        if self._dtype is not None:
            torch.set_default_dtype(dtype)
        while _stack_depth() > depth:
            self._modes.append(_pop_mode())


def _autocast_device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, state: tuple[bool, torch.dtype]) -> None:
    enabled, dtype = state
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()
