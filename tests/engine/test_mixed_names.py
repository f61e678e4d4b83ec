"""One place under two names, a stream's and the module's own: whatever is written under one is seen under the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of

GREEDY = {"temperature": 0.0, "max_tokens": 1}


def stream_then_module(model: Any) -> Any:
    model.resid_post[1] = model.resid_post[1] * 0
    hidden, residual = model.model.layers[1].output
    return hidden + residual


def both_in_place(model: Any) -> Any:
    stream = model.resid_post[1]
    stream *= 2
    hidden, residual = model.model.layers[1].output
    hidden += 1
    return hidden + residual


def parts_zeroed(model: Any) -> Any:
    model.resid_post[1] = model.resid_post[1] * 3
    model.model.layers[1].output[0][:] = 0
    model.model.layers[1].output[1][:] = 0
    return model.resid_post[1]


def put_back_as_read(model: Any) -> Any:
    model.resid_post[1] = model.resid_post[1] * 3
    hidden, residual = model.model.layers[1].output
    model.model.layers[1].output = (hidden, residual)
    return model.resid_post[1]


def module_stream_module(model: Any) -> Any:
    hidden, _ = model.model.layers[1].output
    hidden += 1
    model.resid_post[1] = model.resid_post[1] * 2
    hidden += 1
    return model.resid_post[1]


def stream_module_stream(model: Any) -> Any:
    stream = model.resid_post[1]
    stream += 1
    hidden, residual = model.model.layers[1].output
    hidden += 1
    stream += 1
    return model.resid_post[1]


def read_again_and_scaled(model: Any) -> Any:
    stream = model.resid_post[1]
    stream += 1
    model.model.layers[1].output[0].add_(1)
    again = model.resid_post[1]
    again *= 2
    return again


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (stream_then_module, lambda x: x * 0),
        (both_in_place, lambda x: 2 * x + 1),
        (parts_zeroed, lambda x: x * 0),
        (put_back_as_read, lambda x: 3 * x),
        (module_stream_module, lambda x: 2 * x + 3),
        (stream_module_stream, lambda x: x + 3),
        (read_again_and_scaled, lambda x: 2 * x + 4),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_stream_and_module(llama: Any, block: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    with llama.trace(PROMPT, **GREEDY):
        seen = block(llama).save()
        following = llama.resid_pre[2].save()
    expected = wanted(hf_stream("llama", ids_of("llama")).resid_post[1])
    assert_close(seen, expected)
    assert_close(following, expected)


def test_inputs_of_a_layer_and_of_a_norm(llama: Any) -> None:
    stream = hf_stream("llama", ids_of("llama"))
    with llama.trace(PROMPT, **GREEDY):
        llama.resid_pre[2] = llama.resid_pre[2] * 2
        (_, hidden, residual), _ = llama.model.layers[2].inputs
        before = (hidden + residual).save()
        hidden -= residual
        after = llama.resid_pre[2].save()
    assert_close(before, 2 * stream.resid_pre[2])
    assert torch.equal(after, before)  # what was written lies in the first, and nothing in the second
    with llama.trace(PROMPT, **GREEDY):
        llama.resid_mid[1] = llama.resid_mid[1] * 2
        hidden, residual = llama.model.layers[1].post_attention_layernorm.inputs[0]
        middle = (hidden + residual).save()
    assert_close(middle, 2 * stream.resid_mid[1])
