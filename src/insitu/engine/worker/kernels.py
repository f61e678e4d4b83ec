"""What an eager step runs in place of code that was written to be compiled.

Where vLLM compiles a model it leaves norms, activations and rotary embeddings to the compiler, as several operations of
torch. A step without compilation would run each of these by itself, or an activation compiled apart from the rest,
which takes three times as long; vLLM has kernels for them, which engines without compilation use: on GPUs for all, on
the CPU for rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import activation
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

_KERNELS = "vllm_c"


class EagerKernels:
    """Those of one model; none on other devices."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._norms: list[Any] = _operations() if current_platform.is_cuda() else []
        self._others: list[tuple[Any, Any, Any]] = []
        """Modules, what they run in a compiled model, and what instead."""
        if not current_platform.is_cuda() and not current_platform.is_cpu():
            return
        rotated = "forward_cuda" if current_platform.is_cuda() else "forward_cpu"
        for module in model.modules():
            if isinstance(module, RotaryEmbedding) and _is_plain(type(module), rotated):
                if getattr(module, "_forward_method", None) == module.forward_native:
                    self._others.append((module, module._forward_method, getattr(module, rotated)))
            elif current_platform.is_cuda() and _has_kernel(module):
                self._others.append((module, module._forward_method, module.forward_cuda))

    def used(self) -> AbstractContextManager[None]:
        """Inside, the model's forward runs with them."""
        return self._put() if self._norms or self._others else nullcontext()

    @contextmanager
    def _put(self) -> Iterator[None]:
        with ExitStack() as stack:
            for operation in self._norms:
                stack.enter_context(operation.set_priority([_KERNELS, "native"]))
            for module, _, kernel in self._others:
                vars(module)["_forward_method"] = kernel
            try:
                yield
            finally:
                for module, compiled, _ in self._others:
                    vars(module)["_forward_method"] = compiled


def _has_kernel(module: torch.nn.Module) -> bool:
    """Whether it is an activation that is left to the compiler, of which vLLM has a kernel."""
    if type(module).__module__ != activation.__name__ or not isinstance(module, CustomOp):
        return False
    if type(module).forward_cuda is CustomOp.forward_cuda or getattr(module, "op", None) is None:
        return False
    return module._forward_method != module.forward_cuda


def _is_plain(kind: type[RotaryEmbedding], rotated: str) -> bool:
    """Whether it rotates as its base does, by whatever angles."""
    return all(getattr(kind, name) is getattr(RotaryEmbedding, name) for name in ("forward_native", rotated))


def _operations() -> list[Any]:
    """vLLM's operations that have such a kernel; none before there was a table of them."""
    try:
        from vllm.ir.op import IrOp
    except ImportError:
        return []
    kernels = [(operation, operation.impls.get(_KERNELS)) for operation in IrOp.registry.values()]
    return [operation for operation, kernel in kernels if kernel is not None and kernel.supported]
