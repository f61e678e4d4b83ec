"""A skipped module against transformers with a hook that puts the same value in place of its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from insitu.block import OutOfOrderError, WriteError
from tests.engine.helpers import PROMPT, assert_close, hf, hf_edited, hf_stream, ids_of, layers, plain, summed, trunk
from tests.models import LAYERS, WIDTH

OTHER = "Water boils at one hundred degrees"
PATHS = {
    "llama": {"attention": "self_attn", "mlp": "mlp", "norm": "post_attention_layernorm", "layers": "model.layers"},
    "gpt2": {"attention": "attn", "mlp": "mlp", "norm": "ln_2", "layers": "transformer.h"},
}


@pytest.fixture(params=["llama", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


def value_for(ids: list[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(seed))


def hf_skipped(name: str, ids: list[int], path: str, value: torch.Tensor) -> Any:
    seen = hf_edited(name, ids, {path: lambda _: value})
    return seen[""].output["logits"][-1:]


@pytest.mark.parametrize("part", ["attention", "mlp"])
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_part_of_a_layer(name: str, model: Any, part: str, layer: int) -> None:
    ids = ids_of(name)
    value, child = value_for(ids), PATHS[name][part]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        module = layers(model)[layer].get(child)
        module.skip(value)
        own = module.output.save()
        logits = model.logits.save()
    assert torch.equal(own, value)
    assert_close(logits, hf_skipped(name, ids, f"{PATHS[name]['layers']}.{layer}.{child}", value))


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
def test_a_whole_layer(name: str, model: Any, layer: int) -> None:
    ids = ids_of(name)
    value = value_for(ids)
    part = value_for(ids, seed=1)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        if name == "gpt2":
            layers(model)[layer].skip(value)
        else:
            layers(model)[layer].skip((part, value - part))
        after = model.resid_post[layer].save()
        logits = model.logits.save()
    assert_close(after, value)
    assert_close(logits, hf_skipped(name, ids, f"{PATHS[name]['layers']}.{layer}", value))


def test_a_layer_that_hands_on_what_it_was_given(name: str, model: Any) -> None:
    ids = ids_of(name)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        if name == "gpt2":
            layers(model)[1].skip(layers(model)[1].input)
        else:
            _, hidden, residual = layers(model)[1].inputs[0]
            layers(model)[1].skip((hidden, residual))
        passed = summed(layers(model)[1].output).save()
        logits = model.logits.save()
    before = hf_stream(name, ids).resid_pre[1]
    assert_close(passed, before)
    assert_close(logits, hf_skipped(name, ids, f"{PATHS[name]['layers']}.1", before))


def test_requests_that_skip_one_module_with_values_of_their_own_beside_one_that_does_not(name: str, model: Any) -> None:
    prompts = [PROMPT, OTHER, PROMPT, "Rome"]
    child = PATHS[name]["attention"]
    values = [value_for(ids_of(name, prompt), seed) for seed, prompt in enumerate(prompts)]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for prompt, value in zip(prompts, values, strict=True):
            with tracer.invoke(prompt):
                layers(model)[1].get(child).skip(value)
                logits = model.logits.save()
        with tracer.invoke(OTHER):
            untouched = model.logits.save()
    path = f"{PATHS[name]['layers']}.1.{child}"
    for prompt, value, found in zip(prompts, values, logits, strict=True):
        assert_close(found, hf_skipped(name, ids_of(name, prompt), path, value), prompt)
    assert_close(untouched, hf(name, ids_of(name, OTHER))[""].output["logits"][-1:])


def test_requests_that_skip_a_layer_beside_one_that_does_not(name: str, model: Any) -> None:
    values = [value_for(ids_of(name, prompt), seed) for seed, prompt in enumerate([PROMPT, OTHER])]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for prompt, value in zip([PROMPT, OTHER], values, strict=True):
            with tracer.invoke(prompt):
                layers(model)[2].skip(value if name == "gpt2" else (value, torch.zeros_like(value)))
                logits = model.logits.save()
        with tracer.invoke(PROMPT):
            stream = model.resid_post[2].save()
            untouched = model.logits.save()
    for prompt, value, found in zip([PROMPT, OTHER], values, logits, strict=True):
        assert_close(found, hf_skipped(name, ids_of(name, prompt), f"{PATHS[name]['layers']}.2", value), prompt)
    assert_close(stream, hf_stream(name, ids_of(name)).resid_post[2])
    assert_close(untouched, hf(name, ids_of(name))[""].output["logits"][-1:])


def test_in_every_step(name: str, model: Any) -> None:
    child = PATHS[name]["attention"]
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        logits = [].save()
        for _ in tracer.iter[:]:
            attention = layers(model)[1].get(child)
            args, kwargs = attention.inputs
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            attention.skip(torch.zeros_like(hidden))
            logits.append(model.logits)
        result = tracer.result.save()
    ids = [*ids_of(name), *result.outputs[0].token_ids]
    path = f"{PATHS[name]['layers']}.1.{child}"
    wanted = hf_edited(name, ids, {path: torch.zeros_like})[""].output["logits"]
    assert len(logits) == 5
    for step, found in enumerate(logits):
        assert_close(found, wanted[len(ids_of(name)) - 1 + step][None], f"step {step}")


def test_the_embedding(name: str, model: Any) -> None:
    ids = ids_of(name)
    value = value_for(ids)
    child = "wte" if name == "gpt2" else "embed_tokens"
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        trunk(model).get(child).skip(value)
        logits = model.logits.save()
    assert_close(logits, hf_skipped(name, ids, f"{PATHS[name]['layers'].rpartition('.')[0]}.{child}", value))


def test_a_fused_norm_has_not_changed_the_residual(llama: Any) -> None:
    """vLLM's norm adds to the residual that it is given, in place where the platform has such a kernel."""
    ids = ids_of("llama")
    normed = value_for(ids)
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        norm = llama.model.layers[1].post_attention_layernorm
        hidden, residual = norm.inputs[0]
        norm.skip((normed, hidden + residual))
        logits = llama.logits.save()
    assert_close(logits, hf_skipped("llama", ids, "model.layers.1.post_attention_layernorm", normed))


def test_a_wrong_value_names_the_place_what_it_takes_and_what_it_got(name: str, model: Any) -> None:
    child, count = PATHS[name]["attention"], len(ids_of(name))
    with pytest.raises(
        WriteError, match=rf"1\.{child}\.output takes shape \({count}, {WIDTH}\) .*got shape \(1, {WIDTH}\)"
    ):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            layers(model)[1].get(child).skip(torch.zeros(1, WIDTH))
    assert model.in_flight() == 0


def test_a_place_inside_is_refused_by_name(name: str, model: Any) -> None:
    child, count = PATHS[name]["norm"], len(ids_of(name))
    value = torch.zeros(count, WIDTH)
    with pytest.raises(
        OutOfOrderError, match=rf"\.1\.{child}\.output` can't be read: it is inside `.*\.1`, which is skipped for this"
    ):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            layers(model)[1].skip(value if name == "gpt2" else (value, value))
            seen = layers(model)[1].get(child).output.save()


def test_plain_requests_are_as_before(name: str, model: Any) -> None:
    ids = ids_of(name)
    before = plain(model, [ids], max_tokens=4)[0].outputs[0].token_ids
    with model.trace(PROMPT, temperature=0.0, max_tokens=4):
        layers(model)[1].get(PATHS[name]["mlp"]).skip(torch.zeros(len(ids), WIDTH))
    assert plain(model, [ids], max_tokens=4)[0].outputs[0].token_ids == before
