"""What one block can't do to others, to the engine, or to another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import insitu

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0.0, "max_tokens": 1}


@pytest.fixture(autouse=True)
def engine_lives(llama: Any):
    def logits() -> torch.Tensor:
        with llama.trace(PROMPT, **GREEDY):
            seen = llama.logits.save()
        return seen

    before = logits()
    yield
    assert torch.equal(logits(), before)
    assert llama.in_flight() == 0


class Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in str(function):
            raise RuntimeError("not copied")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(4, 128).to_sparse(),
        torch.ones(4, 128).to_sparse_csr(),
        torch.ones(4, 128, device="meta"),
        torch.ones(4, 128, dtype=torch.complex64),
        torch.ones(4, 128).to_mkldnn(),
    ],
    ids=["sparse", "csr", "meta", "complex", "mkldnn"],
)
def test_odd_tensors_are_refused_and_the_engine_lives(llama: Any, value: torch.Tensor) -> None:
    with pytest.raises((insitu.WriteError, insitu.ArgumentError, RuntimeError)):
        with llama.trace(PROMPT, **GREEDY):
            llama.model.layers[0].mlp.output = value
            llama.logits
    with pytest.raises((insitu.WriteError, insitu.ArgumentError, RuntimeError)):
        with llama.trace(PROMPT, **GREEDY):
            llama.model.layers[0].mlp.skip(value)
            llama.logits


def test_code_of_a_tensor_s_own_can_t_take_the_engine_down(llama: Any) -> None:
    with llama.trace(PROMPT, **GREEDY):
        llama.model.layers[0].mlp.output = torch.zeros(4, 128)
        plain = llama.logits.save()
    odd = torch.zeros(4, 128).as_subclass(Raising)
    try:
        with llama.trace(PROMPT, **GREEDY):
            llama.model.layers[0].mlp.output = odd
            logits = llama.logits.save()
    except RuntimeError as error:
        assert "not copied" in str(error)
    else:
        assert torch.equal(logits, plain)


@pytest.mark.parametrize(
    "reach",
    [
        lambda other: other.model.layers[1].mlp.output,
        lambda other: other.model.layers[1].mlp(torch.zeros(4, 128)),
        lambda other: other.model.layers[1].mlp.source.self_act_fn_0.output,
        lambda other: other.logits,
        lambda other: other.resid_post[0],
        lambda other: other.unembed(torch.zeros(1, 128)),
    ],
    ids=["place", "call", "operation", "logits", "stream", "unembed"],
)
def test_another_model_s_places_are_not_this_one_s(llama: Any, qwen3: Any, reach: Callable[[Any], Any]) -> None:
    with pytest.raises(insitu.OutsideTraceError, match="belongs to another model than the one that this block"):
        with llama.trace(PROMPT, **GREEDY):
            reach(qwen3)


def test_either_name_of_a_setting_on_an_invoke_wins(llama: Any) -> None:
    with llama.trace(temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT, max_new_tokens=2):
            two = tracer.result.save()
    assert len(two.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "prompt",
    [
        [np.int64(token) for token in PROMPT],
        [torch.tensor(token) for token in PROMPT],
        torch.tensor([PROMPT], dtype=torch.int32),
        {"input_ids": [[*PROMPT, 0]], "attention_mask": np.array([[True] * 4 + [False]])},
    ],
    ids=["numpy scalars", "tensor scalars", "one row", "boolean mask"],
)
def test_token_ids_of_every_make(llama: Any, prompt: Any) -> None:
    with llama.trace(prompt, **GREEDY) as tracer:
        result = tracer.result.save()
    assert list(result.prompt_token_ids) == PROMPT


@pytest.mark.parametrize(
    ("prompt", "text"),
    [(b"abc", "got bytes"), ({"input_ids": PROMPT, "attention_mask": [1]}, "1 entries for 4 token ids")],
)
def test_what_is_no_prompt(llama: Any, prompt: Any, text: str) -> None:
    with pytest.raises(insitu.PromptError, match=text):
        llama.trace(prompt)
