"""A request's values are its own: whoever else is in the batch, cached, chunked or edited."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine import locations
from tests.engine.helpers import (
    assert_close,
    assert_greedy,
    completed,
    difference,
    enqueue,
    hf,
    hf_stream,
    layers,
    own_engine,
    plain,
    summed,
)

VOCABULARY = range(4, 480)
SAME = 1e-6
SAME_ROW = 5e-6  # one row alone goes through another matrix product than rows of a batch
LONG = 2e-5  # attention over many random tokens, against transformers


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=count)


def random_prompts(count: int, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    """Prompts of all kinds of length, both extremes among them."""
    lengths = random.Random(count).choices(range(shortest, longest + 1), k=count)
    lengths[:2] = shortest, longest
    return [random_ids(length, seed) for seed, length in enumerate(lengths)]


def watched(model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Every layer's stream and attention output, the logits and the result, each prompt a request."""
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for ids, count in zip(prompts, tokens, strict=True):
            with tracer.invoke(ids, max_tokens=count):
                seen = {"attn": [], "stream": []}
                for layer in layers(model):
                    seen["attn"].append(layer.get("attn" if "attn" in dir(layer) else "self_attn").output)
                    seen["stream"].append(summed(layer.output))
                seen["logits"] = model.logits
                seen["result"] = tracer.result
                seen.save()
    return seen if isinstance(seen, list) else [seen]


def assert_equal_runs(one: dict[str, Any], other: dict[str, Any]) -> None:
    bound = SAME if len(one["stream"][0]) > 1 else SAME_ROW
    for kind in ("attn", "stream"):
        for i, (value, wanted) in enumerate(zip(one[kind], other[kind], strict=True)):
            assert_close(value, wanted, f"{kind} of layer {i}", bound)
    assert_close(one["logits"], other["logits"], "logits", bound)
    assert tokens_of(one["result"]) == tokens_of(other["result"])


def assert_equals_transformers(name: str, ids: Sequence[int], seen: dict[str, Any]) -> None:
    stream = hf_stream(name, ids)
    for i in range(models.LAYERS):
        assert_close(seen["attn"][i], stream.attn_out[i], f"attention of layer {i}", LONG)
        assert_close(seen["stream"][i], stream.resid_post[i], f"layer {i}", LONG)
    assert_close(seen["logits"], stream.logits[-1:], "logits", LONG)


def zeros_like(value: Any) -> Any:
    return tuple(map(torch.zeros_like, value)) if isinstance(value, tuple) else torch.zeros_like(value)


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


# Company.


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def crowded(request: pytest.FixtureRequest, engines: Any) -> Iterator[tuple[str, Any]]:
    """An engine in which most requests wait until others have finished."""
    with own_engine(engines, request.param, max_num_seqs=4) as model:
        yield request.param, model


def test_values_are_the_same_alone_and_in_a_crowd(crowded: tuple[str, Any]) -> None:
    name, model = crowded
    prompts = random_prompts(24)
    tokens = [1 + i * 5 % 7 for i in range(24)]
    others = random_prompts(10, 3, 40)
    their_tokens = [2 + i * 3 % 11 for i in range(10)]
    expected = [
        tokens_of(output)
        for ids, count in zip(others, their_tokens, strict=True)
        for output in plain(model, [ids], max_tokens=count, ignore_eos=True)
    ]
    enqueue(model, others, their_tokens)
    together = watched(model, prompts, tokens)
    assert [tokens_of(output) for output in completed(model)] == expected
    worst = 0.0
    for ids, count, seen in zip(prompts, tokens, together, strict=True):
        (alone,) = watched(model, [ids], [count])
        assert_equal_runs(seen, alone)
        assert_equals_transformers(name, ids, seen)
        assert len(tokens_of(seen["result"])) == count
        pairs = zip(seen["stream"], alone["stream"], strict=True)
        worst = max(worst, *(difference(*pair) for pair in pairs))
    print(f"\n{name}: largest difference of a stream in company and alone {worst:.1e}")
    assert model.in_flight() == 0


def test_untraced_requests_that_finish_after_the_trace_are_not_lost(crowded: tuple[str, Any]) -> None:
    name, model = crowded
    others, theirs = random_prompts(6, 2, 30), [1, 40, 2, 30, 3, 20]
    expected = [
        tokens_of(plain(model, [ids], max_tokens=count, ignore_eos=True)[0])
        for ids, count in zip(others, theirs, strict=True)
    ]
    enqueue(model, others[:3], theirs[:3])
    first = watched(model, random_prompts(3), [1, 2, 3])
    enqueue(model, others[3:], theirs[3:])
    second = watched(model, random_prompts(3), [1, 2, 3])
    assert [tokens_of(output) for output in completed(model)] == expected
    for one, other in zip(first, second, strict=True):
        assert_equal_runs(one, other)
    assert completed(model) == []


def test_every_location_is_narrowed_to_its_request(mixtral: Any, gpt2: Any, llama: Any, qwen3: Any) -> None:
    for name, model in (("mixtral", mixtral), ("gpt2", gpt2), ("llama", llama), ("qwen3", qwen3)):
        layer = "transformer.h.2" if name == "gpt2" else "model.layers.2"
        kinds = [kind for kind in locations.RULES[name] if "{i}" in kind or "." not in kind]
        prompts = random_prompts(len(kinds), 1, 20)
        with model.trace(max_tokens=1) as tracer:
            for kind, ids in zip(kinds, prompts, strict=True):
                with tracer.invoke(ids):
                    node = model.get(kind.replace("{i}", "2"))
                    seen = (node.inputs, node.output).save()
        for kind, ids, places in zip(kinds, prompts, seen, strict=True):
            values = locations.Values(ids, hf(name, ids), layer.rpartition(".")[0])
            rule = locations.RULES[name][kind]
            for found, reference in zip(places, (rule.inputs(values, 2), rule.output(values, 2)), strict=True):
                for value, wanted in zip(locations.tensors_in(found), reference, strict=True):
                    assert_close(value, wanted, f"{kind}, a prompt of {len(ids)}", LONG)


def test_each_request_of_a_batch_has_its_own_edit(llama: Any) -> None:
    prompts = random_prompts(32, 2, 30)
    vectors = torch.randn(32, models.WIDTH, generator=torch.Generator().manual_seed(0))

    def steered(chosen: Sequence[int]) -> list[Any]:
        with llama.trace(temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
            for i in chosen:
                with tracer.invoke(prompts[i]):
                    llama.model.layers[1].output[0][:] += 3 * vectors[i]
                    after = (llama.resid_post[3], llama.logits, tracer.result).save()
        return after if isinstance(after, list) else [after]

    for i, together in enumerate(steered(range(32))):
        (alone,) = steered([i])
        assert_close(together[0], alone[0], f"stream of prompt {i}", SAME)
        assert_close(together[1], alone[1], f"logits of prompt {i}", SAME)
        assert tokens_of(together[2]) == tokens_of(alone[2])
        edits = {"model.layers.1": lambda output, i=i: output + 3 * vectors[i]}
        oracle = models.hf_activations(models.oracle(models.tiny("llama")), prompts[i], edits)
        assert_close(together[1], oracle[""].output["logits"][-1:], f"logits of prompt {i}")


def test_an_edit_leaves_its_neighbours_alone(crowded: tuple[str, Any]) -> None:
    name, model = crowded
    prompts = random_prompts(8, 4, 25)
    before = watched(model, prompts, [5] * 8)
    untraced = [tokens_of(output) for output in plain(model, prompts, max_tokens=9, ignore_eos=True)]
    enqueue(model, prompts, [9] * 8)
    with model.trace(temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        for i, ids in enumerate(prompts):
            with tracer.invoke(ids):
                streams = []
                for layer in layers(model):
                    if i % 3 == 1:
                        layer.output = zeros_like(layer.output)
                    if i % 3 == 2:
                        layer.input = torch.ones_like(layer.input)
                    streams.append(summed(layer.output))
                logits = model.logits.save()
                streams.save()
                result = tracer.result.save()
    assert [tokens_of(output) for output in completed(model)] == untraced
    for i, seen in enumerate(before):
        same = {"attn": seen["attn"], "stream": streams[i], "logits": logits[i], "result": result[i]}
        if i % 3 == 0:
            assert_equal_runs(same, seen)
        elif i % 3 == 1:
            assert streams[i][-1].abs().max() == 0
        assert i % 3 == 0 or difference(logits[i], seen["logits"]) > 1e-2


# Prefix caching.


@pytest.fixture(scope="module")
def caching(engines: Any) -> Iterator[Any]:
    with own_engine(engines, "llama", block_size=32, max_num_seqs=4) as model:
        assert model.vllm_entrypoint.llm_engine.vllm_config.cache_config.enable_prefix_caching
        yield model


def test_a_block_sees_all_rows_of_a_cached_prompt(caching: Any) -> None:
    ids = random_ids(100, seed=1)
    plain(caching, [ids], max_tokens=3)
    (again,) = plain(caching, [ids], max_tokens=3)
    assert again.num_cached_tokens == 96
    first, second = (watched(caching, [ids], [3])[0] for _ in range(2))
    assert first["stream"][0].shape == (100, models.WIDTH)
    assert_equal_runs(first, second)
    assert_equals_transformers("llama", ids, first)
    assert first["result"].num_cached_tokens == 0
    (still,) = plain(caching, [ids], max_tokens=3)
    assert still.num_cached_tokens == 96
    assert tokens_of(still) == tokens_of(first["result"])


def test_cached_requests_run_beside_a_block(caching: Any) -> None:
    ids, others = random_ids(100, seed=11), [random_ids(count, seed=count) for count in (80, 65, 33)]
    expected = [tokens_of(output) for output in plain(caching, [ids, *others], max_tokens=6, ignore_eos=True)]
    enqueue(caching, [ids, *others], [6] * 4)
    assert_equals_transformers("llama", ids, watched(caching, [ids], [6])[0])
    found = completed(caching)
    assert [tokens_of(output) for output in found] == expected
    assert [output.num_cached_tokens for output in found] == [96, 64, 64, 32]


def test_the_same_prompt_several_times_in_one_trace(caching: Any) -> None:
    ids = random_ids(70, seed=2)
    for seen in watched(caching, [ids, ids, ids[:50], ids], [2, 2, 2, 2]):
        assert_equals_transformers("llama", ids[: len(seen["stream"][0])], seen)


def test_what_an_edit_leaves_in_the_cache_is_nobody_elses(caching: Any) -> None:
    ids = random_ids(90, seed=3)
    with caching.trace(ids, temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
        caching.model.layers[0].output[0][:] = 5.0
        edited = tracer.result.save()
    (first,) = plain(caching, [ids], max_tokens=8, ignore_eos=True)
    assert first.num_cached_tokens == 0
    assert_greedy("llama", ids, tokens_of(first))
    assert tokens_of(edited) != tokens_of(first)
    (second,) = plain(caching, [ids], max_tokens=8, ignore_eos=True)
    assert second.num_cached_tokens == 64
    assert tokens_of(second) == tokens_of(first)
    with caching.trace(ids, temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
        stream = caching.resid_post[3].save()
    assert_close(stream, hf_stream("llama", ids).resid_post[3])


def test_several_sequences_of_a_long_prompt_each_see_it_whole(caching: Any) -> None:
    ids = random_ids(60, seed=4)
    with caching.trace(ids, n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True) as tracer:
        stream = caching.resid_post[2].save()
        result = tracer.result.save()
    assert len(stream) == 3
    for value in stream:
        assert_close(value, hf_stream("llama", ids).resid_post[2])
    assert len(result[0].outputs) == 3


def test_a_salt_of_the_users_own_keeps_its_meaning(caching: Any) -> None:
    prompt = {"prompt_token_ids": random_ids(40, seed=6), "cache_salt": "mine"}
    with caching.trace(prompt, temperature=0.0, max_tokens=2) as tracer:
        result = tracer.result.save()
    assert result.num_cached_tokens == 0
    assert prompt["cache_salt"] == "mine"


# Chunked prefill.


@pytest.fixture(scope="module")
def chunking(engines: Any) -> Iterator[Any]:
    with own_engine(engines, "llama", max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=True) as model:
        yield model


def test_a_prompt_is_never_cut_in_pieces(chunking: Any) -> None:
    prompts = [random_ids(40, seed) for seed in range(12)]
    for ids, seen in zip(prompts, watched(chunking, prompts, [1 + i % 4 for i in range(12)]), strict=True):
        assert_equals_transformers("llama", ids, seen)


def test_a_prompt_is_whole_beside_others_that_are_cut(chunking: Any) -> None:
    others = [random_ids(150, seed) for seed in range(20, 23)]
    expected = [tokens_of(output) for output in plain(chunking, others, max_tokens=12, ignore_eos=True)]
    chunking.vllm_entrypoint.reset_prefix_cache()
    enqueue(chunking, others, [12, 12, 12])
    prompts = random_prompts(10, 1, 64)
    for ids, seen in zip(prompts, watched(chunking, prompts, [3] * 10), strict=True):
        assert_equals_transformers("llama", ids, seen)
    assert [tokens_of(output) for output in completed(chunking)] == expected


@pytest.mark.in_process  # ranks add up in another order, by as much as the bound
def test_edits_with_chunks_are_those_without(chunking: Any, llama: Any) -> None:
    prompts = [random_ids(length, length) for length in (64, 33, 32, 50, 1)]

    def edited(model: Any) -> list[torch.Tensor]:
        with model.trace(temperature=0.0, max_tokens=3) as tracer:
            for ids in prompts:
                with tracer.invoke(ids):
                    model.model.layers[1].mlp.output[-1] = 2.0
                    logits = model.logits.save()
        return logits

    for chunked, whole in zip(edited(chunking), edited(llama), strict=True):
        assert_close(chunked, whole, bound=SAME)


def test_a_prompt_larger_than_a_step_is_refused(chunking: Any) -> None:
    with pytest.raises(insitu.PromptError, match="max_num_batched_tokens=100"):
        chunking.trace(random_ids(100, seed=0), max_tokens=1)
    (output,) = plain(chunking, [random_ids(100, seed=0)], max_tokens=1)
    assert len(tokens_of(output)) == 1


def test_the_last_row_is_the_last_token(chunking: Any) -> None:
    ids = random_ids(64, seed=9)
    with chunking.trace(ids, max_tokens=1):
        last = chunking.resid_post[3][-1:].save()
    assert_close(last, hf_stream("llama", ids).resid_post[3][-1:])


# Preemption: the KV cache holds about three of these requests to their end.


@pytest.fixture(scope="module")
def preempting(engines: Any) -> Iterator[Any]:
    with own_engine(
        engines, "llama", block_size=32, num_gpu_blocks_override=12, max_num_batched_tokens=64, max_num_seqs=8
    ) as model:
        yield model


PREEMPTED = [random_ids(60, seed) for seed in range(40, 48)]


def test_a_block_that_has_read_all_it_reads_bears_being_preempted(preempting: Any) -> None:
    expected = [tokens_of(plain(preempting, [ids], max_tokens=60, ignore_eos=True)[0]) for ids in PREEMPTED]
    for ids, seen, tokens in zip(PREEMPTED, watched(preempting, PREEMPTED, [60] * 8), expected, strict=True):
        assert_equals_transformers("llama", ids, seen)
        assert tokens_of(seen["result"]) == tokens


def test_a_request_with_an_edited_prompt_goes_on_as_alone(preempting: Any) -> None:
    """Never a text that goes on from an edited prompt half the way, and from the plain one after that."""

    def edited(prompts: list[list[int]]) -> list[list[int]]:
        def block(tracer: Any) -> Any:
            preempting.model.layers[0].output[0][:10] = 3.0
            return tokens_of(tracer.result)

        return preempting.run(block, prompts, temperature=0.0, max_tokens=60, ignore_eos=True)

    assert edited(PREEMPTED)[:3] == [edited([ids])[0] for ids in PREEMPTED[:3]]


def test_what_somebody_preempts_by_hand_is_an_error(preempting: Any) -> None:
    """`reset_prefix_cache(reset_running_requests=True)` takes the memory of all running requests away."""
    llm, steps = preempting.vllm_entrypoint, itertools.count()
    core = llm.llm_engine.engine_core

    def get_output() -> Any:
        if next(steps) == 2:
            llm.reset_prefix_cache(reset_running_requests=True)
        return type(core).get_output(core)

    core.get_output = get_output
    try:
        with pytest.raises(insitu.RequestError, match=r"preempted.*can't be run twice"):
            with preempting.trace(PREEMPTED[0], temperature=0.0, max_tokens=20, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    preempting.resid_post[0]
    finally:
        del core.get_output
    assert preempting.in_flight() == 0


def test_an_edit_of_what_is_drawn_survives_being_preempted(preempting: Any) -> None:
    with preempting.trace(temperature=0.0, max_tokens=50, ignore_eos=True) as tracer:
        for ids in PREEMPTED:
            with tracer.invoke(ids):
                preempting.samples[0] = 5
                result = tracer.result.save()
    for ids, output in zip(PREEMPTED, result, strict=True):
        first, *others = tokens_of(output)
        assert first == 5
        assert len(others) == 49
        assert_greedy("llama", [*ids, first], others)


def test_untraced_requests_are_preempted_as_ever(preempting: Any) -> None:
    expected = [tokens_of(plain(preempting, [ids], max_tokens=60, ignore_eos=True)[0]) for ids in PREEMPTED]
    enqueue(preempting, PREEMPTED, [60] * 8)
    for ids, seen in zip(PREEMPTED, watched(preempting, PREEMPTED, [1] * 8), strict=True):
        assert_equals_transformers("llama", ids, seen)
    assert [tokens_of(output) for output in completed(preempting)] == expected
