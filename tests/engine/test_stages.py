"""Blocks beside a model whose layers lie on two stages of a pipeline: `pytest --engine two-stages`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_edited, hf_stream, ids_of, layers, own_engine, plain, summed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(30, method="thread", func_only=True),
    pytest.mark.usefixtures("on_stages"),
]

Block = Callable[[Any], Any]
FIRST, SECOND = (0, 1), (2, 3)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    model = request.getfixturevalue("model") if "model" in request.fixturenames else None
    yield
    assert model is None or model.in_flight() == 0


def run(model: Any, block: Block, prompt: Any = PROMPT, **settings: Any) -> Any:
    return model.run(block, prompt, temperature=0.0, ignore_eos=True, **settings)


def kinds_of_layers(worker: Any) -> list[str]:
    model = worker.model_runner.get_model()
    found = getattr(model, "transformer", None)
    return [type(layer).__name__ for layer in (found.h if found is not None else model.model.layers)]


def test_each_stage_has_two_of_four_layers(model: Any) -> None:
    first, second = model.vllm_entrypoint.collective_rpc(kinds_of_layers)
    assert first[2:] == second[:2] == ["PPMissingLayer"] * 2
    assert "PPMissingLayer" not in (*first[:2], *second[2:])


def test_the_tree_has_the_modules_of_both_stages(model: Any) -> None:
    assert "PPMissingLayer" not in str(model)
    assert len(model.resid_post) == 4


def test_reads_of_both_stages_in_one_block_at_every_step(model: Any, name: str) -> None:
    with model.trace(PROMPT, temperature=0.0, ignore_eos=True, max_tokens=4) as tracer:
        result = tracer.result.save()
    ids = [*ids_of(name), *result.outputs[0].token_ids]
    start = 0
    for streams, norm, logits in run(model, lambda tracer: in_order(model, tracer), max_tokens=4):
        stop = start + len(norm)
        wanted = hf_stream(name, ids[:stop])
        pairs = zip(wanted.resid_pre, wanted.resid_post, strict=True)
        for value, layer in zip(streams, chain.from_iterable(pairs), strict=True):
            assert_close(value, layer[start:])
        assert_close(norm, wanted.final_norm[start:])
        assert_close(logits, wanted.logits[-1:])
        start = stop
    assert start == len(ids) - 1


def in_order(model: Any, tracer: Any) -> Any:
    found = []
    for _ in tracer.iter[:]:
        streams = [stream for i in range(4) for stream in (model.resid_pre[i], model.resid_post[i])]
        found.append((streams, model.final_norm, model.logits))
    return found


@pytest.mark.parametrize("source", FIRST)
@pytest.mark.parametrize("target", SECOND)
def test_an_edit_on_the_second_stage_from_a_value_of_the_first(model: Any, name: str, source: int, target: int) -> None:
    ids = ids_of(name)
    early = hf_stream(name, ids).resid_post[source]
    path = f"{'transformer.h' if name == 'gpt2' else 'model.layers'}.{target}"
    wanted = hf_edited(name, ids, {path: lambda value: value + 0.5 * early})[""].output["logits"]

    def block(tracer: Any) -> Any:
        early = model.resid_post[source]
        model.resid_post[target] += 0.5 * early
        return model.logits

    assert_close(run(model, block, max_tokens=1), wanted[-1:])


@pytest.mark.parametrize("late", SECOND)
@pytest.mark.parametrize("early", FIRST)
def test_an_edit_on_the_first_stage_from_a_value_of_the_second_is_refused(model: Any, early: int, late: int) -> None:
    def block(tracer: Any) -> None:
        value = model.resid_post[late]
        model.resid_post[early] += value

    with pytest.raises(insitu.OutOfOrderError, match=rf"\.{early}\.output` has gone by.*\.{late}\.output`"):
        run(model, block, max_tokens=2)


def test_a_value_of_the_second_stage_is_used_on_the_first_in_the_next_step(model: Any, name: str) -> None:
    def block(tracer: Any) -> Any:
        kept, seen = None, []
        for _ in tracer.iter[:]:
            if kept is not None:
                model.resid_post[0] += kept
            seen.append(model.resid_post[1])
            kept = model.resid_post[3][-1:].clone()
            seen.append(kept)
        return seen

    seen = run(model, block, max_tokens=2)
    stream = hf_stream(name, ids_of(name))
    assert_close(seen[1], stream.resid_post[3][-1:])

    def alone(tracer: Any) -> Any:
        tracer.next()
        model.resid_post[0] += seen[1]
        return model.resid_post[1]

    assert torch.equal(seen[2], run(model, alone, max_tokens=2))


def test_samples_that_a_block_writes_are_what_the_first_stage_goes_on_with(model: Any, name: str) -> None:
    def block(tracer: Any) -> Any:
        found = []
        for step in tracer.iter[:]:
            found.append(model.embed)
            model.samples[:] = 40 + step
        return found

    def written(tracer: Any) -> Any:
        return block(tracer), tracer.result

    found, result = run(model, written, max_tokens=4)
    assert list(result.outputs[0].token_ids) == [40, 41, 42, 43]
    wanted = hf_stream(name, [*ids_of(name), 40, 41, 42])
    assert_close(torch.cat(found), wanted.embed)


def test_logits_that_a_block_writes_decide_what_is_drawn(model: Any) -> None:
    def block(tracer: Any) -> Any:
        for step in tracer.iter[:]:
            model.logits[:, 50 + step] = 1e4
        return tracer.result

    assert list(run(model, block, max_tokens=3).outputs[0].token_ids) == [50, 51, 52]


def test_tokens_are_known_on_the_first_stage(model: Any) -> None:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            found.append(tracer.tokens)
            model.embed
        return found, tracer.result

    tokens, result = run(model, block, max_tokens=3)
    drawn = [model.tokenizer.decode([token]) for token in result.outputs[0].token_ids]
    assert [each[len(tokens[0]) :] for each in tokens] == [[], drawn[:1], drawn[:2]]


@pytest.mark.parametrize("layer", [*FIRST, *SECOND])
def test_an_error_surfaces_once_on_its_own_line_and_leaves_others_alone(model: Any, name: str, layer: int) -> None:
    with pytest.raises(ZeroDivisionError) as caught, model.trace(max_tokens=3, ignore_eos=True) as tracer:
        rows = [].save()
        for number in range(4):
            with tracer.invoke(PROMPT):
                value = layers(model)[layer].output
                if number == 2:
                    1 / 0
                rows.append(summed(value))
    assert caught.value.invoke == 2
    assert len(rows) == 3
    for each in rows:
        assert_close(each, hf_stream(name, ids_of(name)).resid_post[layer])


@pytest.mark.parametrize("layer", [0, 3])
def test_modules_of_either_stage_are_applied_to_values_from_either(model: Any, name: str, layer: int) -> None:
    def block(tracer: Any) -> Any:
        value = model.resid_post[layer]
        return value, [each.mlp(value) for each in layers(model)], model.unembed(model.apply_final_norm(value))

    value, parts, logits = run(model, block, max_tokens=1)
    stream, folder = hf_stream(name, ids_of(name)), models.tiny(name)
    assert_close(value, stream.resid_post[layer])
    oracle = models.oracle(folder)
    trunk = oracle.transformer.h if name == "gpt2" else oracle.model.layers
    with torch.no_grad():
        for part, each in zip(parts, trunk, strict=True):
            assert_close(part, each.mlp(value))
        norm = oracle.transformer.ln_f if name == "gpt2" else oracle.model.norm
        assert_close(logits, oracle.lm_head(norm(value)))


def test_a_wrong_call_of_a_module_of_the_second_stage_is_the_blocks_error(model: Any) -> None:
    with pytest.raises((RuntimeError, insitu.InsituError)):
        run(model, lambda tracer: layers(model)[3].mlp(model.embed[:, :7]), max_tokens=1)
    with pytest.raises(insitu.LocationError, match="KV cache"):
        run(model, lambda tracer: layers(model)[3](model.embed), max_tokens=1)


def test_a_block_may_draw_what_it_reads(model: Any) -> None:
    def block(tracer: Any) -> Any:
        count = 0
        for _ in tracer.iter[:]:
            for layer in layers(model):
                if random.random() < 0.5:
                    layer.mlp.output[:] *= random.random()
                    count += 1
                if random.random() < 0.3:
                    model.unembed(layer.output if name_of(model) == "gpt2" else layer.output[0])
        return count

    for _ in range(3):
        assert len(run(model, block, [PROMPT, "She", "Water boils at"], max_tokens=4)) == 3


def name_of(model: Any) -> str:
    return "gpt2" if "transformer" in dir(model) else "llama"


def test_twenty_runs_are_identical(model: Any) -> None:
    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            model.mlp_out[1] *= 0.5
            model.mlp_out[2] *= 1.5
            found.append(model.logits)
        return torch.cat(found)

    first, *others = [run(model, block, max_tokens=3) for _ in range(20)]
    assert all(torch.equal(first, other) for other in others)


def test_caches_record_both_stages(model: Any, name: str) -> None:
    cache = run(model, lambda tracer: tracer.cache(), max_tokens=2)
    trunk = "transformer.h" if name == "gpt2" else "model.layers"
    stream = hf_stream(name, ids_of(name))
    for layer in range(4):
        prefill, decode = cache[f"{trunk}.{layer}"].output
        assert_close(summed(prefill), stream.resid_post[layer])
        assert len(summed(decode)) == 1


def test_many_traced_requests_beside_untraced_ones(model: Any, name: str) -> None:
    prompts = [ids_of(name, f"{PROMPT} {word}") for word in "abcdefghijkl"]
    tokens = [each.outputs[0].token_ids for each in plain(model, prompts, max_tokens=6, ignore_eos=True)]
    with model.trace(temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        values, results = [].save(), [].save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                values.append([model.resid_post[3][-1] for _ in tracer.iter[:]])
                results.append(tracer.result)
    assert sorted(list(each.outputs[0].token_ids) for each in results) == sorted(map(list, tokens))
    assert [len(each) for each in values] == [6] * 12


def test_steps_in_which_nobody_waits_run_as_vllm_runs_them(model: Any) -> None:
    before = model.stats()
    run(model, lambda tracer: model.resid_post[3], max_tokens=8)
    after = model.stats()
    assert after.eager_steps - before.eager_steps == 1
    assert after.plain_steps - before.plain_steps >= 6


def break_second_stage(worker: Any) -> None:
    from vllm.distributed import get_pp_group

    if get_pp_group().is_last_rank:
        worker.model_runner.get_model().model.layers[3].mlp.__dict__["forward"] = lambda *args: [][0]


@pytest.mark.timeout(120, method="thread")
def test_a_stage_that_fails_leaves_nobody_waiting(engines: Any) -> None:
    with own_engine(engines, "llama", pipeline_parallel_size=2) as broken:
        broken.vllm_entrypoint.collective_rpc(break_second_stage)
        with pytest.raises(insitu.EngineError, match="the engine failed in a step"):
            run(broken, lambda tracer: (broken.resid_post[1], broken.logits), max_tokens=2)


def test_what_there_is_not_is_refused_by_name() -> None:
    for beside in ({"tensor_parallel_size": 2}, {"taps": ["resid_post"]}):
        (name,) = beside
        with pytest.raises(insitu.ArgumentError, match=f"`pipeline_parallel_size`.*`{name}`"):
            insitu.VLLM("some/model", pipeline_parallel_size=2, dispatch=True, **beside)


def test_a_loop_over_the_layers_of_both_stages_beside_stops_around_it(llama: Any) -> None:
    stream = hf_stream("llama", ids_of("llama"))
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        normed = llama.model.norm.output[0].save()
        around = llama.source.self_model_0.output.save()
    assert torch.equal(around, normed)
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1):
        outputs = [].save()
        for _ in range(models.LAYERS):
            llama.model.source.layer_0.inputs
            outputs.append(llama.model.source.layer_0.output)
    for (hidden, residual), wanted in zip(outputs, stream.resid_post, strict=True):
        assert_close(hidden + residual, wanted)
