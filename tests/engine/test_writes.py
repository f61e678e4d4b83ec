"""Edits of modules: what a block writes is what the model goes on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.helpers import (
    PROMPT,
    Edit,
    assert_close,
    difference,
    hf_edited,
    hf_stream,
    ids_of,
    last_logits,
    layers,
    oracle_logits,
)
from tests.models import WIDTH

# In-place edits. Each changes the tensor that it is given.


def whole(x: torch.Tensor) -> None:
    x[:] = 0.5


def last_row(x: torch.Tensor) -> None:
    x[-1] = 2.0


def added(x: torch.Tensor) -> None:
    x += 0.25


def scaled(x: torch.Tensor) -> None:
    x.mul_(-0.5)


def view_of_a_slice(x: torch.Tensor) -> None:
    part = x[2:]
    columns = part[:, 3:90:2]
    columns += 1.5


def one_row_taken_out(x: torch.Tensor) -> None:
    row = x[1]
    row.clamp_(-0.1, 0.1)


def transposed(x: torch.Tensor) -> None:
    x.T[7] = 4.0


def masked(x: torch.Tensor) -> None:
    x[x > 0.3] = -1.0


def mask_filled(x: torch.Tensor) -> None:
    x.masked_fill_(x.abs() < 0.5, 0.0)


def indexed(x: torch.Tensor) -> None:
    x.index_put_((torch.tensor([0, 2]), torch.tensor([5, 6])), torch.tensor([3.0, -3.0]))


def into_out(x: torch.Tensor) -> None:
    torch.tanh(x, out=x)


def copied(x: torch.Tensor) -> None:
    x.copy_(x.flip(0))


def viewed(x: torch.Tensor) -> None:
    x.view(-1)[::3] = 0.0


def detached(x: torch.Tensor) -> None:
    x.detach().add_(1.0)


IN_PLACE = [
    whole,
    last_row,
    added,
    scaled,
    view_of_a_slice,
    one_row_taken_out,
    transposed,
    masked,
    mask_filled,
    indexed,
    into_out,
    copied,
    viewed,
    detached,
]
# Places that vLLM and transformers both have: (insitu's path, transformers' path, which side of it).
OUTPUTS = {
    "llama": [
        ("model.embed_tokens", "model.embed_tokens", "output"),
        ("model.layers.1.self_attn", "model.layers.1.self_attn", "output"),
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "output"),
        ("model.layers.2.self_attn.attn", "model.layers.2.self_attn.o_proj", "input"),
        ("model.layers.0.mlp", "model.layers.0.mlp", "output"),
        ("model.layers.3.mlp.act_fn", "model.layers.3.mlp.down_proj", "input"),
        ("model.layers.2.input_layernorm", "model.layers.2.input_layernorm", "output"),
        ("model.norm", "model.norm", "output"),
    ],
    "gpt2": [
        ("transformer.wte", "transformer.wte", "output"),
        ("transformer.h.1.attn", "transformer.h.1.attn", "output"),
        ("transformer.h.2.attn.attn", "transformer.h.2.attn.c_proj", "input"),
        ("transformer.h.0.mlp", "transformer.h.0.mlp", "output"),
        ("transformer.h.1.mlp.act", "transformer.h.1.mlp.act", "output"),
        ("transformer.h.3.ln_2", "transformer.h.3.ln_2", "output"),
        ("transformer.h.1", "transformer.h.1", "output"),
        ("transformer.ln_f", "transformer.ln_f", "output"),
    ],
}


def returning(change: Callable[[torch.Tensor], None]) -> Edit:
    def edit(x: torch.Tensor) -> torch.Tensor:
        change(x)
        return x

    return edit


def first_of(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda change: change.__name__)
def test_in_place(name: str, model: Any, change: Callable[[torch.Tensor], None]) -> None:
    unedited = hf_stream(name, ids_of(name)).logits[-1:]
    with model.trace(max_tokens=1) as tracer:
        for path, _, _ in OUTPUTS[name]:
            with tracer.invoke(PROMPT):
                change(first_of(model.get(path).output))
                logits = model.logits.save()
    effects = 0
    for (path, reference, side), found in zip(OUTPUTS[name], logits, strict=True):
        wanted = oracle_logits(name, reference, side, returning(change))
        assert_close(found, wanted, path)
        effects += difference(wanted, unedited) > 1e-3
    assert effects >= 4, "the edits are to matter: a norm hides some, and the last layer those of other rows"


def test_in_place_at_many_places_of_one_request(name: str, model: Any) -> None:
    places = OUTPUTS[name]
    chosen = [places[0], places[1], places[4] if name == "gpt2" else places[3], places[-1]]
    with model.trace(PROMPT, max_tokens=1):
        for path, _, _ in chosen:
            first_of(model.get(path).output)[2:] *= 1.5
        logits = model.logits.save()

    def edit(x: torch.Tensor) -> torch.Tensor:
        x[2:] *= 1.5
        return x

    sides: dict[str, dict[str, Edit]] = {"outputs": {}, "inputs": {}}
    for _, reference, side in chosen:
        sides[f"{side}s"][reference] = edit
    assert_close(logits, last_logits(hf_edited(name, ids_of(name), **sides)))


def test_augmented_assignment(name: str, model: Any) -> None:
    mlp = layers(model)[1].mlp
    with model.trace(PROMPT, max_tokens=1):
        mlp.output += 0.5
        mlp.output *= 2
        logits = model.logits.save()
    path = "transformer.h.1.mlp" if name == "gpt2" else "model.layers.1.mlp"
    assert_close(logits, oracle_logits(name, path, "output", lambda x: (x + 0.5) * 2))


@pytest.mark.parametrize(
    "change", [lambda x: x.data.mul_(2), lambda x: np.multiply(x.numpy(), 2, out=x.numpy())], ids=["data", "numpy"]
)
def test_in_place_behind_torchs_back(llama: Any, change: Callable[[torch.Tensor], None]) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        change(llama.model.layers[1].mlp.output)
        logits = llama.logits.save()
    assert_close(logits, oracle_logits("llama", "model.layers.1.mlp", "output", lambda x: x * 2))


# Replacement.


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(7))


def test_an_output_is_replaced(name: str, model: Any) -> None:
    with model.trace(max_tokens=1) as tracer:
        for path, _, _ in OUTPUTS[name]:
            with tracer.invoke(PROMPT):
                node = model.get(path)
                before = node.output
                if isinstance(before, tuple):
                    node.output = (noise(before[0]), *before[1:])
                else:
                    node.output = noise(before)
                logits = model.logits.save()
    for (path, reference, side), found in zip(OUTPUTS[name], logits, strict=True):
        assert_close(found, oracle_logits(name, reference, side, noise), path)


INPUTS = {
    "llama": [
        "model.layers.1.self_attn.o_proj",
        "model.layers.2.mlp",
        "model.layers.2.mlp.down_proj",
        "model.layers.0.input_layernorm",
    ],
    "gpt2": [
        "transformer.h.0.attn.c_attn",
        "transformer.h.1.ln_1",
        "transformer.h.1.ln_2",
        "transformer.h.1.attn",
        "transformer.h.2.mlp",
        "transformer.h.2.mlp.c_proj",
        "transformer.h.3",
        "transformer.ln_f",
    ],
}


def test_an_input_is_replaced_for_that_module_alone(name: str, model: Any) -> None:
    """A norm's input is the stream, which goes on past the norm: replacing the one must leave the other."""
    with model.trace(max_tokens=1) as tracer:
        for path in INPUTS[name]:
            with tracer.invoke(PROMPT):
                node = model.get(path)
                node.input = noise(node.input)
                logits = model.logits.save()
    for path, found in zip(INPUTS[name], logits, strict=True):
        assert_close(found, oracle_logits(name, path, "input", noise), path)


def test_inputs_are_replaced_whole(name: str, model: Any) -> None:
    path = "transformer.h.2.mlp" if name == "gpt2" else "model.layers.2.mlp"
    mlp = model.get(path)
    attention = model.get(path.replace("mlp", "attn" if name == "gpt2" else "self_attn"))
    with model.trace(PROMPT, max_tokens=1):
        args, kwargs = attention.inputs
        attention.inputs = args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}
        args, kwargs = mlp.inputs
        mlp.inputs = (args[0] + 1, *args[1:]), kwargs
        logits = model.logits.save()
    attended = path.replace("mlp", "attn" if name == "gpt2" else "self_attn")
    edits = {attended: lambda x: x * 2, path: lambda x: x + 1}
    assert_close(logits, last_logits(hf_edited(name, ids_of(name), inputs=edits)))


def test_replacing_an_input_leaves_it_to_others_in_the_batch(gpt2: Any) -> None:
    with gpt2.trace(max_tokens=1) as tracer:
        for i in range(6):
            with tracer.invoke(PROMPT):
                norm = gpt2.transformer.h[1].ln_2
                if i % 2:
                    norm.input = norm.input * i
                logits = gpt2.logits.save()
    for i, found in enumerate(logits):
        factor = i if i % 2 else 1
        wanted = oracle_logits("gpt2", "transformer.h.1.ln_2", "input", lambda x, factor=factor: x * factor)
        assert_close(found, wanted, f"request {i}")


def test_replacements_and_edits_of_one_tensor_side_by_side(gpt2: Any) -> None:
    """A norm's input is the stream: an edit in place changes both, a replacement the input alone."""
    kinds = ["edit", "replace", "none", "replace", "edit", "both", "edit"]
    norm = gpt2.transformer.h[1].ln_2
    with gpt2.trace(max_tokens=1) as tracer:
        for kind in kinds:
            with tracer.invoke(PROMPT):
                if kind in ("edit", "both"):
                    norm.input[:] *= 2
                if kind in ("replace", "both"):
                    norm.input = norm.input * 3
                normed = norm.output.save()
                logits = gpt2.logits.save()
    attention, into = "transformer.h.1.attn", "transformer.h.1.ln_2"
    before = hf_stream("gpt2", ids_of("gpt2")).resid_pre[1]
    for i, kind in enumerate(kinds):
        outputs: dict[str, Edit] = {}
        inputs: dict[str, Edit] = {}
        if kind in ("edit", "both"):
            outputs[attention] = lambda x: (before + x) * 2 - before
        if kind in ("replace", "both"):
            inputs[into] = lambda x: x * 3
        seen = hf_edited("gpt2", ids_of("gpt2"), outputs, inputs)
        assert_close(normed[i], seen[into].output, f"{kind}, request {i}: norm")
        assert_close(logits[i], last_logits(seen), f"{kind}, request {i}")


def test_a_layer_is_replaced_by_its_parts_or_by_their_sum(llama: Any) -> None:
    with llama.trace(max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            hidden, residual = llama.model.layers[1].output
            llama.model.layers[1].output = (hidden * 2, residual * 2)
            logits = llama.logits.save()
        with tracer.invoke(PROMPT):
            llama.resid_post[1] = llama.resid_post[1] * 2
            logits = llama.logits.save()
        with tracer.invoke(PROMPT):
            llama.resid_post[1][:] *= 2
            logits = llama.logits.save()
        with tracer.invoke(PROMPT):
            llama.resid_pre[2] *= 2
            logits = llama.logits.save()
    wanted = oracle_logits("llama", "model.layers.1", "output", lambda x: x * 2)
    for found in logits:
        assert_close(found, wanted)


STREAMS = ["embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm"]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_standard_name_is_written(name: str, model: Any, stream: str) -> None:
    at = stream if stream in ("embed", "final_norm") else None
    with model.trace(max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            value = getattr(model, at) if at else getattr(model, stream)[1]
            value[-2:] = noise(value[-2:])
            logits = model.logits.save()
        with tracer.invoke(PROMPT):
            value = (getattr(model, at) if at else getattr(model, stream)[1]).clone()
            value[-2:] = noise(value[-2:])
            if at:
                setattr(model, at, value)
            else:
                getattr(model, stream)[1] = value
            logits = model.logits.save()

    def edit(x: torch.Tensor) -> torch.Tensor:
        x[-2:] = noise(x[-2:])
        return x

    trunk = "transformer" if name == "gpt2" else "model"
    layer = "transformer.h.1" if name == "gpt2" else "model.layers.1"
    attention = "attn" if name == "gpt2" else "self_attn"
    reference = {
        "embed": ({f"{trunk}.{'wte' if name == 'gpt2' else 'embed_tokens'}": edit}, {}),
        "resid_pre": ({}, {layer: edit}),
        "attn_out": ({f"{layer}.{attention}": edit}, {}),
        "mlp_out": ({f"{layer}.mlp": edit}, {}),
        "resid_post": ({layer: edit}, {}),
        "final_norm": ({f"{trunk}.{'ln_f' if name == 'gpt2' else 'norm'}": edit}, {}),
    }
    if stream == "resid_mid":  # transformers has no module there: what attention adds makes up for the rest
        before = hf_stream(name, ids_of(name)).resid_pre[1]
        reference["resid_mid"] = ({f"{layer}.{attention}": lambda x: edit(before + x) - before}, {})
    outputs, inputs = reference[stream]
    wanted = last_logits(hf_edited(name, ids_of(name), outputs, inputs))
    for found in logits:
        assert_close(found, wanted, stream)


def test_what_was_written_is_what_is_read_and_edited_next(llama: Any) -> None:
    mlp = llama.model.layers[1].mlp
    with llama.trace(PROMPT, max_tokens=1):
        mine = torch.ones_like(mlp.output)
        mlp.output = mine
        same = (mlp.output == 1).all().item().save()
        mlp.output[-1] = 3.0
        mine[:] = 99.0  # the block's own tensor, no part of the model
        now = mlp.output.save()
        logits = llama.logits.save()

    def edit(x: torch.Tensor) -> torch.Tensor:
        x = torch.ones_like(x)
        x[-1] = 3.0
        return x

    assert same is True
    assert_close(now, edit(now))
    assert_close(logits, oracle_logits("llama", "model.layers.1.mlp", "output", edit))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_another_floating_dtype_is_converted(llama: Any, dtype: torch.dtype) -> None:
    with llama.trace(PROMPT, max_tokens=1):
        mlp = llama.model.layers[2].mlp
        mlp.output = noise(mlp.output).to(dtype)
        kept = mlp.output.dtype.save()
        logits = llama.logits.save()
    assert kept == torch.float32
    wanted = oracle_logits("llama", "model.layers.2.mlp", "output", lambda x: noise(x).to(dtype).float())
    assert_close(logits, wanted)


def test_tensors_of_any_make_can_be_written(llama: Any) -> None:
    """Expanded, strided, with gradients, of inference mode, a parameter."""
    mlp = llama.model.layers[2].mlp
    row = torch.linspace(-1, 1, WIDTH)
    with torch.inference_mode():
        of_inference = row.clone()
    makes = {
        "expanded": lambda x: row.expand_as(x),
        "strided": lambda x: row.repeat(len(x), 2).view(len(x), 2, WIDTH).transpose(0, 1)[1],
        "with gradients": lambda x: row.clone().requires_grad_().expand_as(x) * 1,
        "of inference mode": lambda x: of_inference.expand_as(x),
        "parameter": lambda x: torch.nn.Parameter(row.repeat(len(x), 1)),
    }
    with llama.trace(max_tokens=1) as tracer:
        for make in makes.values():
            with tracer.invoke(PROMPT):
                mlp.output = make(mlp.output)
                logits = llama.logits.save()
    wanted = oracle_logits("llama", "model.layers.2.mlp", "output", lambda x: row.expand_as(x))
    for make, found in zip(makes, logits, strict=True):
        assert_close(found, wanted, make)
