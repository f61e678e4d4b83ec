"""What is written into the stream is exactly what the model goes on with, in bfloat16 with large values too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.architectures.configs import ARCHITECTURES, LAYERS, WIDTH
from tests.architectures.conftest import engine, params
from tests.engine.helpers import PROMPT

NAMES = ["gpt2", "llama", "gemma2", "granite", "olmo2", "gpt_neox", "falcon_sequential", "cohere", "mixtral"]
OTHERS = ["The capital of Japan is the city of", "Water boils at one hundred degrees; it freezes"]
HOW = ["assigned", "in place", "some rows"]


@pytest.fixture(scope="module", params=params(sorted(NAMES, key=list(ARCHITECTURES).index)))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, engines: Any) -> Iterator[Any]:
    with engine(engines, name, "bfloat16") as made:
        yield made


def large(seed: int, rows: int) -> torch.Tensor:
    return (3e4 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))).bfloat16()


def write(model: Any, key: str, layer: int, how: str) -> torch.Tensor:
    """Writes large values over a stream, or over some of its rows; returns what it is then to be."""
    stream = getattr(model, key)
    value = stream[layer].clone()
    rows = slice(1, 4) if how == "some rows" else slice(None)
    value[rows] = large(layer, len(value))[rows]
    if how == "assigned":
        stream[layer] = value
    else:
        stream[layer][rows] = value[rows]
    return value


def streams_sum(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
    """What a norm is given, where vLLM may leave the addition to it."""
    given = [each for each in (*inputs[0], *inputs[1].values()) if isinstance(each, torch.Tensor)]
    return given[0] if len(given) == 1 or given[1].data_ptr() == given[0].data_ptr() else given[0] + given[1]


def has_mid(name: str) -> bool:
    return "resid_mid" not in ARCHITECTURES[name].absent


@pytest.mark.parametrize("how", HOW)
def test_the_next_layer_receives_what_was_written(name: str, model: Any, how: str) -> None:
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(OTHERS[0]):
            one = model.logits.save()
        with tracer.invoke(PROMPT):
            wanted = write(model, "resid_post", 0, how).save()
            received = model.resid_pre[1].save()
            model.attn_out[1] = torch.zeros_like(wanted)
            mid = model.resid_mid[1].save() if has_mid(name) else wanted
            model.mlp_out[1] = torch.zeros_like(wanted)
            after = model.resid_post[1].save()
        with tracer.invoke(OTHERS[1]):
            two = model.logits.save()
    assert wanted.abs().max() > 3e4
    assert received.equal(wanted)
    assert mid.equal(wanted)
    assert after.equal(wanted)
    for prompt, logits in zip(OTHERS, (one, two), strict=True):
        with model.trace(prompt, temperature=0.0, max_tokens=1):
            alone = model.logits.save()
        assert logits.equal(alone)


@pytest.mark.parametrize("how", HOW)
def test_the_final_norm_receives_what_was_written(name: str, model: Any, how: str) -> None:
    path = {
        "gpt2": "transformer.ln_f",
        "gpt_neox": "gpt_neox.final_layer_norm",
        "falcon_sequential": "transformer.ln_f",
    }
    norm = model.get(path.get(name, "model.norm"))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        wanted = write(model, "resid_post", LAYERS - 1, how).save()
        inputs = norm.inputs.save()
        normed = model.final_norm.save()
        by_hand = model.apply_final_norm(wanted).save()
    if name == "cohere":  # its norm is given the layer's own input beside, and leaves it alone
        inputs = ((inputs[0][0],), {})
    assert streams_sum(inputs).equal(wanted)
    torch.testing.assert_close(normed, by_hand, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("how", HOW)
def test_the_middle_of_a_layer_goes_on_with_what_was_written(name: str, model: Any, how: str) -> None:
    if not has_mid(name):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            model.resid_pre[1] = torch.zeros_like(model.resid_pre[1])
            wanted = write(model, "attn_out", 1, how).save()
            model.mlp_out[1] = torch.zeros_like(wanted)
            after = model.resid_post[1].save()
        assert after.equal(wanted)
        return
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        wanted = write(model, "resid_mid", 1, how).save()
        model.mlp_out[1] = torch.zeros_like(wanted)
        after = model.resid_post[1].save()
    assert after.equal(wanted)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("key", ["attn_out", "mlp_out"])
def test_what_is_written_is_what_is_added(name: str, model: Any, key: str, how: str) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.resid_pre[1] = torch.zeros_like(model.resid_pre[1])
        if key == "attn_out":
            wanted = write(model, key, 1, how).save()
            model.mlp_out[1] = torch.zeros_like(wanted)
        else:
            model.attn_out[1] = torch.zeros_like(model.attn_out[1])
            wanted = write(model, key, 1, how).save()
        after = model.resid_post[1].save()
    if ARCHITECTURES[name].reference.multiplier == 1 and name != "falcon_sequential":
        assert after.equal(wanted)
    else:  # times a multiplier, or plus a bias: to rounding
        torch.testing.assert_close(after, wanted, rtol=2**-7, atol=2**-7)
