"""Every module location that transformers also has holds the value that transformers computes there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine import locations
from tests.engine.helpers import BOUND, PROMPT, assert_close, difference, hf, hf_stream, ids_of, module_paths, summed
from tests.engine.locations import Values

TABLES = Path(__file__).resolve().parent.parent.parent / "build" / "values"
LAYER_PATHS = {"gpt2": "transformer.h"}
FUNCTIONS = {"output": lambda node: node.output, "inputs": lambda node: node.inputs}


@pytest.fixture(params=["mixtral", "gpt2", "llama", "qwen3"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


@pytest.fixture
def wanted(name: str) -> Values:
    ids = ids_of(name)
    return Values(ids, hf(name, ids), LAYER_PATHS.get(name, "model.layers"))


def paths_of(model: Any) -> list[str]:
    """Every module of the model that vLLM runs, under each of its paths, asked of vLLM itself; of each rank."""
    return list(dict.fromkeys(chain(*model.vllm_entrypoint.apply_model(module_paths))))


def read_all(model: Any, paths: Iterable[str], prompt: Any, site: str) -> list[Any]:
    """One place of each module, a request for each, all of them running together."""
    read = FUNCTIONS[site]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for path in paths:
            with tracer.invoke(prompt):
                value = read(model.get(path)).save()
    return value


def test_every_module_is_compared_or_skipped_for_a_reason(name: str, model: Any) -> None:
    unknown = [
        path
        for path in paths_of(model)
        if locations.layer_of(path)[0] not in locations.RULES[name] and locations.reason_to_skip(path) is None
    ]
    assert unknown == []


def test_no_rule_is_for_a_module_that_is_not_there(name: str, model: Any) -> None:
    there = {locations.layer_of(path)[0] for path in paths_of(model)}
    assert set(locations.RULES[name]) <= there


def test_all_locations_equal_transformers(name: str, model: Any, wanted: Values) -> None:
    rules = locations.RULES[name]
    paths = [path for path in paths_of(model) if locations.layer_of(path)[0] in rules]
    largest: dict[tuple[str, str], tuple[float, float]] = {}
    wrong: list[str] = []
    for site in FUNCTIONS:
        for path, value in zip(paths, read_all(model, paths, wanted.ids, site), strict=True):
            kind, layer = locations.layer_of(path)
            reference = getattr(rules[kind], site)(wanted, layer)
            found = locations.tensors_in(value)
            assert len(found) == len(reference), f"{path}.{site}: {len(found)} tensors, not {len(reference)}"
            worst = max(difference(*pair) for pair in zip(found, reference, strict=True))
            size = max(tensor.abs().max().item() for tensor in reference)
            before = largest.get((kind, site), (0.0, 0.0))
            largest[kind, site] = (max(before[0], worst), max(before[1], size))
            if worst > BOUND:
                wrong.append(f"{path}.{site}: {worst:.2e}")
    write_table(name, largest)
    assert wrong == []


def write_table(name: str, largest: dict[tuple[str, str], tuple[float, float]]) -> None:
    lines = [
        f"# {name}: insitu on vLLM against transformers, float32 on the CPU",
        "",
        "Largest absolute difference at each kind of location, over all layers and tokens, relative to the",
        "largest value there where that is above 1.",
        "",
        "| location | largest difference | largest value |",
        "|---|---|---|",
    ]
    for (kind, site), (worst, size) in largest.items():
        lines.append(f"| `{kind.replace('{i}', '*')}.{site}` | {worst:.1e} | {size:.3g} |")
    TABLES.mkdir(parents=True, exist_ok=True)
    (TABLES / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("", *lines, sep="\n")


def test_modules_that_are_never_called_say_so(name: str, model: Any, wanted: Values) -> None:
    rules = locations.RULES[name]
    for path in [path for path in paths_of(model) if path and locations.layer_of(path)[0] not in rules]:
        node = model.get(path)
        try:
            value = model.run(lambda tracer, node=node: node.output, PROMPT, max_tokens=1)
        except (insitu.NotReachedError, insitu.SharedModuleError) as error:
            assert path in str(error)
        else:  # vLLM 0.32 calls the method that its fused experts run by
            assert path.endswith(".experts.routed_experts.quant_method"), path
            assert_close(value, wanted.out("mlp.experts", locations.layer_of(path)[1]), path)


def test_input_is_the_first_argument(name: str, model: Any, wanted: Values) -> None:
    path = "transformer.h.1.mlp" if name == "gpt2" else "model.layers.1.post_attention_layernorm"
    with model.trace(PROMPT, max_tokens=1):
        first = model.get(path).input.save()
    assert_close(first, locations.RULES[name][locations.layer_of(path)[0]].inputs(wanted, 1)[0])
    attention = model.get("transformer.h.1.attn" if name == "gpt2" else "model.layers.1.self_attn")
    with model.trace(PROMPT, max_tokens=1):  # vLLM calls it by keyword
        first = attention.input.save()
        inputs = attention.inputs.save()
    assert inputs[0] == ()
    assert first.equal(next(iter(inputs[1].values())))


def test_a_layer_leaves_the_stream_that_transformers_returns(name: str, model: Any, wanted: Values) -> None:
    layers = model.get(wanted.layers)
    with model.trace(PROMPT, max_tokens=1):
        outputs = [layer.output for layer in layers].save()
    for i, output in enumerate(outputs):
        assert_close(summed(output), wanted.out("", i), f"layer {i}")


def test_the_standard_names_are_the_stream_of_transformers(name: str, model: Any, wanted: Values) -> None:
    names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    with model.trace(PROMPT, max_tokens=1):
        embed = model.embed.save()
        layers = range(len(model.resid_post))
        found = [{each: getattr(model, each)[i] for each in names} for i in layers].save()
        final_norm = model.final_norm.save()
    stream = hf_stream(name, wanted.ids)
    assert_close(embed, stream.embed, "embed")
    assert len(found) == models.LAYERS
    for i, values in enumerate(found):
        for each in names:
            assert_close(values[each], getattr(stream, each)[i], f"{each}[{i}]")
    assert_close(final_norm, stream.final_norm, "final_norm")


def test_layers_asked_for_in_any_order_are_those_layers(name: str, model: Any, wanted: Values) -> None:
    chosen = [3, 0, 2]
    found = read_all(model, [f"{wanted.layers}.{i}" for i in chosen], PROMPT, "output")
    for i, output in zip(chosen, found, strict=True):
        assert_close(summed(output), wanted.out("", i), f"layer {i}")


def test_logits_and_samples(name: str, model: Any, wanted: Values) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        logits = model.logits.save()
        drawn = model.samples.save()
        result = tracer.result.save()
    assert logits.shape == (1, wanted.last_logits.shape[-1])
    assert_close(logits, wanted.last_logits)
    assert drawn.shape == (1,)
    assert drawn.item() == wanted.last_logits.argmax().item() == result.outputs[0].token_ids[0]


def test_unembedding_the_final_norm_gives_the_logits_of_every_position(name: str, model: Any, wanted: Values) -> None:
    norm = model.get("transformer.ln_f" if name == "gpt2" else "model.norm")
    with model.trace(PROMPT, max_tokens=1):
        normed = norm.output
        every = model.unembed(normed if isinstance(normed, torch.Tensor) else normed[0]).save()
    assert_close(every, wanted.seen[""].output["logits"])


def test_calling_a_module_on_values_of_the_block(name: str, model: Any, wanted: Values) -> None:
    mlp = "mlp" if name != "mixtral" else "block_sparse_moe"
    module = model.get(f"{wanted.layers}.2.{mlp}")
    with model.trace(PROMPT, max_tokens=1):
        given = module.input
        by_hand = module(given).save()
        output = module.output.save()
    assert_close(by_hand, wanted.out("mlp", 2))
    assert_close(output, wanted.out("mlp", 2))


def test_a_shared_embedding_is_served_whatever_else_is_read_beside(qwen3: Any) -> None:
    """Qwen 3's `lm_head` is its `embed_tokens`: only the embedding is called. Two stages have one each."""
    stream = hf_stream("qwen3", ids_of("qwen3"))
    with (
        pytest.raises((insitu.SharedModuleError, insitu.NotReachedError), match="lm_head") as caught,
        qwen3.trace(max_tokens=1) as tracer,
    ):
        found = [].save()
        with tracer.invoke(PROMPT):
            found.append(qwen3.model.embed_tokens.output)
        with tracer.invoke(PROMPT):
            qwen3.lm_head.output.sum()
        with tracer.invoke(PROMPT):
            found.append(qwen3.model.embed_tokens.output)
    assert caught.value.invoke == 1
    assert len(found) == 2
    for value in found:
        assert_close(value, stream.embed)


def test_a_real_model(smollm2: Any) -> None:
    """SmolLM2's stream reaches 24,000, so the bound is on the relative difference."""
    folder = insitu.demo_model()
    ids = models.encode(folder, PROMPT)
    stream = models.hf_residuals(models.oracle(folder), ids)
    with smollm2.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        embedded = smollm2.model.embed_tokens.output.save()
        outputs = [layer.output for layer in smollm2.model.layers].save()
        logits = smollm2.logits.save()
        result = tracer.result.save()
    assert_close(embedded, stream.embed)
    assert len(outputs) == len(stream.resid_post) == 30
    worst = 0.0
    for i, (output, reference) in enumerate(zip(outputs, stream.resid_post, strict=True)):
        assert_close(summed(output), reference, f"layer {i}")
        worst = max(worst, difference(summed(output), reference))
    assert_close(logits, stream.logits[-1:])
    assert result.outputs[0].text == " Paris"
    print(f"\nSmolLM2: largest relative difference of the stream {worst:.1e}")
