"""`tracer.cache` on the real engine: the values are those of reading place by place, and of transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine import locations
from tests.engine.helpers import (
    PROMPT,
    assert_close,
    difference,
    hf,
    hf_stream,
    ids_of,
    own_engine,
    plain,
    summed,
)
from tests.engine.locations import Values, tensors_in

LAYER_PATHS = {"gpt2": "transformer.h"}


@pytest.fixture(params=["mixtral", "gpt2", "llama", "qwen3"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(name)


def test_all_modules_equal_transformers(name: str, model: Any) -> None:
    """One trace, no `.save()`; every module of every layer, with what it takes and what it returns."""
    wanted = Values(ids_of(name), hf(name, ids_of(name)), LAYER_PATHS.get(name, "model.layers"))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        cache = tracer.cache(inputs=True)
    rules = locations.RULES[name]
    compared = 0
    for path, cached in cache.items():
        kind, layer = locations.layer_of(path)
        if kind not in rules:
            continue
        for site in ("output", "inputs"):
            found = tensors_in(getattr(cached, site))
            reference = getattr(rules[kind], site)(wanted, layer)
            assert len(found) == len(reference), f"{path}.{site}"
            for pair in zip(found, reference, strict=True):
                assert_close(*pair, f"{path}.{site}")
                compared += 1
    assert compared > 100
    expected = {path for path in dict.fromkeys(cache) if locations.reason_to_skip(path) is None}
    assert {locations.layer_of(path)[0] for path in expected} == set(rules)


def test_equals_reading_the_same_places_one_by_one(name: str, model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        cache = tracer.cache(inputs=True).save()
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for path in cache:
            with tracer.invoke(PROMPT):
                read = (model.get(path).inputs, model.get(path).output).save()
    for (path, cached), (inputs, output) in zip(cache.items(), read, strict=True):
        for found, reference in (
            (tensors_in(cached.output), tensors_in(output)),
            (tensors_in(cached.inputs), tensors_in(inputs)),
        ):
            assert [tensor.shape for tensor in found] == [tensor.shape for tensor in reference], path
            assert all(map(torch.equal, found, reference)), path


def test_every_step_of_a_generation(llama: Any) -> None:
    steps = 4
    with llama.trace(PROMPT, temperature=0.0, max_tokens=steps, ignore_eos=True) as tracer:
        cache = tracer.cache("model.layers.*")
        result = tracer.result.save()
    ids = [*ids_of("llama"), *result.outputs[0].token_ids]
    stream = hf_stream("llama", ids[:-1])
    assert list(cache) == [f"model.layers.{i}" for i in range(models.LAYERS)]
    for i, cached in enumerate(cache.values()):
        assert cached.steps == list(range(steps))
        assert [len(output[0]) for output in cached.output] == [len(ids_of("llama")), 1, 1, 1]
        assert_close(torch.cat([summed(output) for output in cached.output]), stream.resid_post[i], f"layer {i}")
    assert (
        result.outputs[0].token_ids
        == plain(llama, [ids_of("llama")], max_tokens=steps, ignore_eos=True)[0].outputs[0].token_ids
    )


def test_of_each_request_in_company(llama: Any) -> None:
    prompts = models.SENTENCES[:5]
    with llama.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                cache = tracer.cache(["**.mlp", llama.model.norm])
    assert len(cache) == len(prompts)
    for prompt, one in zip(prompts, cache, strict=True):
        stream = hf_stream("llama", ids_of("llama", prompt))
        for i in range(models.LAYERS):
            assert_close(one.model.layers[i].mlp.output[0], stream.mlp_out[i])
        assert_close(one.model.norm.output[0][0], stream.final_norm)
        assert len(one) == models.LAYERS + 1


def test_sees_the_block_s_own_edits_at_their_places(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        cache = tracer.cache(["**.mlp", "model.layers.*"], inputs=True)
        llama.model.layers[1].mlp.output[:] = 0
        after = llama.resid_post[1].save()
        llama.resid_post[2] = after
    assert not cache["model.layers.1.mlp"].output.any()
    assert cache["model.layers.0.mlp"].output.any()
    assert summed(cache.model.layers[1].output).equal(after)
    assert summed(cache.model.layers[2].output).equal(after)
    hidden, residual = tensors_in(cache.model.layers[3].inputs)[1:]
    assert (hidden + residual).equal(after)


def test_goes_on_after_the_block_and_beside_a_neighbour_that_fails(llama: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught, llama.trace(max_tokens=3, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            cache = tracer.cache("model.norm")
        with tracer.invoke(PROMPT):
            lost = tracer.cache()
            llama.model.layers[2].output[0].sum() / (1 // 0)
    assert caught.value.invoke == 1
    assert cache["model.norm"].steps == [0, 1, 2]
    assert llama.in_flight() == 0


def test_in_the_function_form_with_other_settings(llama: Any) -> None:
    def block(tracer: Any) -> Any:
        return tracer.cache("lm*processor", outputs=True, inputs=True, dtype=torch.float64)

    with pytest.raises(insitu.UnknownModuleError, match=r"`lm\*processor`; the nearest is `.*logits_processor`"):
        llama.run(block, PROMPT, max_tokens=1)

    cache = llama.run(lambda tracer: tracer.cache("logits_*", dtype=torch.float64).save(), PROMPT, max_tokens=1)
    assert cache.logits_processor.output.dtype == torch.float64
    assert difference(cache.logits_processor.output, hf_stream("llama", ids_of("llama")).logits[-1:].double()) < 1e-5


def test_several_sequences_have_a_cache_each(llama: Any) -> None:
    with llama.trace(PROMPT, n=2, temperature=1.0, seed=3, max_tokens=2, ignore_eos=True) as tracer:
        cache = tracer.cache("model.embed_tokens")
    assert [one["model.embed_tokens"].steps for one in cache] == [[0, 1], [0, 1]]
    assert cache[0] is not cache[1]


def test_pickles_and_goes_to_safetensors_and_back(name: str, model: Any, tmp_path: Path) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        cache = tracer.cache(inputs=True)
    file = tmp_path / "cache.safetensors"
    cache.save_safetensors(file)
    for other in (insitu.Cache.load_safetensors(file), pickle.loads(pickle.dumps(cache))):
        assert list(other) == list(cache)
        for path in cache:
            assert other[path].steps == cache[path].steps
            found, wanted = (
                tensors_in([other[path].output, other[path].inputs]),
                tensors_in([cache[path].output, cache[path].inputs]),
            )
            assert len(found) == len(wanted)
            assert all(map(torch.equal, found, wanted))
            assert type(other[path].output[0]) is type(cache[path].output[0])


def test_steps_are_eager_only_while_a_cache_records(llama: Any) -> None:
    before = llama.stats()
    with llama.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        llama.logits.sum()
    between = llama.stats()
    assert between.eager_steps == before.eager_steps
    with llama.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        tracer.next()
        cache = tracer.cache("model.norm")
    assert cache["model.norm"].steps == [1, 2]
    after = llama.stats()
    assert after.eager_steps - between.eager_steps in (2, 3)


def test_refusals_show_the_line(llama: Any) -> None:
    with pytest.raises(insitu.ArgumentError, match=r"`model.layers` is a list.*`model.layers.\*`"):
        with llama.trace(PROMPT, max_tokens=1) as tracer:
            tracer.cache(llama.model.layers)
    with pytest.raises(insitu.OutsideTraceError, match=r"`tracer.cache` exists only while the model runs"):
        with llama.trace(max_tokens=1) as tracer:
            tracer.cache()
            with tracer.invoke(PROMPT):
                pass


def test_a_request_that_records_is_not_preempted(engines: Any) -> None:
    prompts = [torch.randint(4, 480, (60,), generator=torch.manual_seed(seed)).tolist() for seed in range(8)]
    settings = {"block_size": 32, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with own_engine(engines, "llama", **settings) as model:
        with model.trace(temperature=0.0, max_tokens=60, ignore_eos=True) as tracer:
            for ids in prompts:
                with tracer.invoke(ids):
                    cache = tracer.cache("model.norm")
        for ids, one in zip(prompts, cache, strict=True):
            rows = [normed[0] for normed in one["model.norm"].output]
            assert one["model.norm"].steps == list(range(60))
            assert [len(each) for each in rows] == [len(ids)] + [1] * 59
            assert_close(rows[0], hf_stream("llama", ids).final_norm)
