"""What an eager step runs in place of code that was written to be compiled.

Where vLLM compiles a model it leaves norms and rotary embeddings to the compiler, as several operations of torch.
A step without compilation would run each of these by itself; vLLM has kernels for them, which engines without
compilation use: on GPUs for both, on the CPU for rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

_KERNELS = "vllm_c"


class EagerKernels:
    """Those of one model; none on other devices."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._norms: list[Any] = _operations() if current_platform.is_cuda() else []
        self._rotary: list[Any] = []
        self._rotated = "forward_cuda" if current_platform.is_cuda() else "forward_cpu"
        if not current_platform.is_cuda() and not current_platform.is_cpu():
            return
        plain = [
            each
            for each in model.modules()
            if isinstance(each, RotaryEmbedding) and _is_plain(type(each), self._rotated)
        ]
        self._rotary = [each for each in plain if getattr(each, "_forward_method", None) == each.forward_native]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model's forward runs with them."""
        with ExitStack() as stack:
            for operation in self._norms:
                stack.enter_context(operation.set_priority([_KERNELS, "native"]))
            for module in self._rotary:
                module._forward_method = getattr(module, self._rotated)
            try:
                yield
            finally:
                for module in self._rotary:
                    module._forward_method = module.forward_native


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
