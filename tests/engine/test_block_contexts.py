"""Contexts that a block holds open while the model runs are the block's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.helpers import (
    PROMPT,
    assert_close,
    hf_stream,
    ids_of,
    layers,
    summed,
)
from tests.models import LAYERS, WIDTH


class Doubling(TorchFunctionMode):
    """Spoils every addition that it sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.add, torch.Tensor.add, torch.Tensor.matmul) else result


class Zeroing(TorchDispatchMode):
    """Spoils every operation that makes floating numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and "mm" in str(func):
            return torch.zeros_like(result)
        return result


class DefaultDtype:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(torch.float32)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": DefaultDtype,
    "function mode": Doubling,
    "dispatch mode": Zeroing,
}


@pytest.mark.parametrize("context", list(CONTEXTS))
def test_a_context_held_open_in_a_block_is_the_blocks_own(llama: Any, gpt2: Any, context: str) -> None:
    for name, model in (("llama", llama), ("gpt2", gpt2)):
        stream = hf_stream(name, ids_of(name))
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                with CONTEXTS[context]():
                    streams = [summed(layer.output) for layer in layers(model)]
                    logits = model.logits.save()
                    drawn = model.samples.save()
                inside = None
            with tracer.invoke(PROMPT):
                inside = [layer.mlp.output for layer in layers(model)].save()
                logits = model.logits.save()
                drawn = model.samples.save()
        for i, value in enumerate(inside[-1] if isinstance(inside[0], list) else inside):
            assert_close(value, stream.mlp_out[i], f"{context}: layer {i} of the request beside")
        for value in logits:
            assert_close(value, stream.logits[-1:], f"{context}: logits")
        assert [value.item() for value in drawn] == [stream.logits[-1].argmax().item()] * 2
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_a_context_goes_on_in_the_block_after_each_wait(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kinds = [(layer.mlp.output @ torch.ones(WIDTH, 2)).dtype for layer in llama.model.layers].save()
        with torch.enable_grad():
            llama.logits
            grad = torch.is_grad_enabled().save()
        outside = torch.is_grad_enabled().save()
        plainly = (llama.logits @ torch.ones(llama.logits.shape[1], 2)).dtype.save()
    assert kinds == [torch.bfloat16] * LAYERS
    assert (grad, outside) == (True, False)
    assert plainly == torch.float32
