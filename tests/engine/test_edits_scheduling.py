"""Requests under edits as the scheduler sees them: what they share of the prefix cache, whether prompts are kept whole,
what they may be preempted for, which path their steps take, and that nothing is left of many of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

import insitu
from tests import models
from tests.engine.helpers import (
    assert_close,
    assert_greedy,
    completed,
    enqueue,
    hf_stream,
    own_engine,
    plain,
)

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

VECTOR = torch.linspace(-4, 4, models.WIDTH)
TOKENS = {"max_tokens": 6, "ignore_eos": True}


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 480, (count,), generator=generator).tolist()


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def steer(model: Any, factor: float = 1.0) -> Any:
    """What does the same to every row."""
    vector = VECTOR * factor
    with model.edit() as (tracer, edit):
        for _ in tracer.all():
            model.resid_post[1][:] += vector
    assert edit.same_for_rows
    return edit


def steer_and_watch(model: Any) -> Any:
    """The same, by a block that reads."""
    vector = VECTOR
    with model.edit() as (tracer, edit):
        shapes = [].save()
        for _ in tracer.all():
            model.resid_post[1][:] += vector
            shapes.append(model.resid_post[1].shape[0])
    assert not edit.same_for_rows
    return edit


@pytest.fixture(scope="module")
def caching(engines: Any) -> Iterator[Any]:
    with own_engine(engines, "llama", block_size=32, max_num_seqs=8) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "caching" in request.fixturenames:
        model = request.getfixturevalue("caching")
        model.clear_edits()
        assert model.in_flight() == 0


# The prefix cache.


def test_requests_with_the_same_edits_share_what_they_computed(caching: Any) -> None:
    ids = random_ids(90, seed=1)
    (unedited,) = plain(caching, [ids], **TOKENS)
    steer(caching)
    first, second = (plain(caching, [ids], **TOKENS)[0] for _ in range(2))
    assert [first.num_cached_tokens, second.num_cached_tokens] == [0, 64]
    assert tokens_of(first) == tokens_of(second) != tokens_of(unedited)
    assert tokens_of(caching.generate(ids, edits=[], temperature=0.0, **TOKENS)[0]) == tokens_of(first)
    steer(caching, -1.0)  # which undoes it
    (both,) = plain(caching, [ids], **TOKENS)
    assert both.num_cached_tokens == 0
    assert tokens_of(both) == tokens_of(unedited)
    caching.clear_edits()
    (after,) = plain(caching, [ids], **TOKENS)
    assert after.num_cached_tokens == 64
    assert tokens_of(after) == tokens_of(unedited)
    assert_greedy("llama", ids, tokens_of(after))


def test_an_edit_installed_anew_shares_nothing_with_the_one_before(caching: Any) -> None:
    ids, found = random_ids(90, seed=2), []
    for factor in (1.0, 2.0):
        edit = steer(caching, factor)
        found.append(plain(caching, [ids], **TOKENS)[0])
        edit.clear()
    assert [output.num_cached_tokens for output in found] == [0, 0]
    assert tokens_of(found[0]) != tokens_of(found[1])


def test_what_follows_a_generated_text_is_edited_there_too(caching: Any) -> None:
    """A prompt that holds what was generated before: its keys were computed under the edit, step by step."""
    ids = random_ids(40, seed=3)
    steer(caching)
    (first,) = plain(caching, [ids], max_tokens=40, ignore_eos=True)
    longer = [*ids, *tokens_of(first)]
    (second,) = plain(caching, [longer], **TOKENS)
    assert second.num_cached_tokens == 64
    caching.vllm_entrypoint.reset_prefix_cache()
    (again,) = plain(caching, [longer], **TOKENS)
    assert again.num_cached_tokens == 0
    assert tokens_of(again) == tokens_of(second)


def test_an_edit_that_reads_sees_the_whole_prompt_each_time(caching: Any) -> None:
    ids = random_ids(90, seed=4)
    steer(caching)
    (wanted,) = plain(caching, [ids], **TOKENS)
    caching.clear_edits()
    steer_and_watch(caching)
    for _ in range(2):
        (output,) = plain(caching, [ids], **TOKENS)
        assert output.num_cached_tokens == 0
        assert output.saves["shapes"] == [90, 1, 1, 1, 1, 1]
        assert tokens_of(output) == tokens_of(wanted)


def test_an_edit_of_the_prefill_alone_shares_nothing(caching: Any) -> None:
    """Else the keys of generated tokens, which it has not edited, would be those of another's prompt."""
    ids = random_ids(90, seed=5)
    with caching.edit() as (tracer, edit):
        caching.resid_post[1][:] += 1
    assert not edit.same_for_rows
    found = [plain(caching, [ids], **TOKENS)[0].num_cached_tokens for _ in range(2)]
    assert found == [0, 0]


def test_a_salt_of_the_callers_goes_on_to_part_requests(caching: Any) -> None:
    ids = random_ids(90, seed=6)
    steer(caching)
    llm, found = caching.vllm_entrypoint, []
    for salt in ("a", "b", "a"):
        (output,) = llm.generate([{"prompt_token_ids": ids, "cache_salt": salt}], use_tqdm=False)
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 64]


# Long prompts, small caches.


def test_a_long_prompt_comes_in_pieces_only_where_that_makes_no_difference(engines: Any) -> None:
    ids = random_ids(100, seed=7)
    with own_engine(engines, "llama", max_num_batched_tokens=256) as roomy:
        steer(roomy)
        (wanted,) = plain(roomy, [ids], **TOKENS)
    with own_engine(engines, "llama", max_num_batched_tokens=32, max_num_seqs=4) as model:
        edit = steer(model)
        (output,) = plain(model, [ids], **TOKENS)
        assert output.error is None
        assert tokens_of(output) == tokens_of(wanted)
        (generated,) = model.generate(ids, temperature=0.0, **TOKENS)
        assert tokens_of(generated) == tokens_of(wanted)
        edit.clear()
        steer_and_watch(model)
        refused, whole = plain(model, [ids, ids[:30]], **TOKENS)
        assert isinstance(refused.error, insitu.RequestError)
        assert "raise max_num_batched_tokens to at least 100" in str(refused.error)
        assert whole.saves["shapes"] == [30, 1, 1, 1, 1, 1]
        model.clear_edits()
        assert model.in_flight() == 0
        assert_greedy("llama", ids, tokens_of(plain(model, [ids], **TOKENS)[0]))


@pytest.mark.parametrize("edit", [steer, steer_and_watch])
def test_a_cache_too_small_gives_the_text_of_a_roomy_one(engines: Any, caching: Any, edit: Any) -> None:
    prompts = [random_ids(count, seed=count) for count in (8, 5, 12, 9, 7, 6)]
    settings = {"max_tokens": 90, "ignore_eos": True}
    edit(caching)
    wanted = plain(caching, prompts, **settings)
    with own_engine(engines, "llama", block_size=32, num_gpu_blocks_override=10, max_num_seqs=8) as small:
        scheduler = small.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []
        scheduler._preempt_request = lambda request, *args, **kwargs: (
            preempted.append(request),
            preempt(request, *args, **kwargs),
        )
        edit(small)
        found = plain(small, prompts, **settings)
        small.clear_edits()
        assert small.in_flight() == 0
    assert [output.error for output in found] == [None] * 6
    assert [tokens_of(output) for output in found] == [tokens_of(output) for output in wanted]
    assert bool(preempted) is (edit is steer)


# The path of a step.


def test_steps_in_which_no_edit_waits_run_as_vllm_runs_them(caching: Any) -> None:
    with caching.edit() as (tracer, _):
        hidden = caching.resid_post[1].save()
    before = caching.stats()
    (output,) = plain(caching, [random_ids(9, seed=8)], **TOKENS)
    after = caching.stats()
    assert after.eager_steps - before.eager_steps == 1
    assert after.plain_steps - before.plain_steps == 5
    assert_close(output.saves["hidden"], hf_stream("llama", random_ids(9, seed=8)).resid_post[1])


def test_edits_at_taps_are_made_by_tables_and_beside_other_blocks_by_eager_steps(engines: Any, caching: Any) -> None:
    prompts = [random_ids(count, seed=count) for count in (7, 4, 9)]
    settings = {"max_tokens": 8, "ignore_eos": True}
    steer(caching)
    wanted = [tokens_of(output) for output in plain(caching, prompts, **settings)]
    with caching.trace(prompts[0], temperature=0.0, **settings) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(caching.resid_post[2])
    steer(caching, 0.5)
    twice = [tokens_of(output) for output in plain(caching, prompts, **settings)]
    with own_engine(engines, "llama", enforce_eager=False, max_num_seqs=8, taps=["resid_post"]) as tapped:
        steer(tapped)
        assert [tokens_of(output) for output in plain(tapped, prompts, **settings)] == wanted
        before = tapped.stats()
        assert [tokens_of(output) for output in plain(tapped, prompts, **settings)] == wanted
        assert tapped.stats().tapped_steps - before.tapped_steps >= 7
        with tapped.trace(prompts[0], temperature=0.0, **settings) as tracer:
            seen = [].save()
            for _ in tracer.all():
                seen.append(tapped.resid_post[2])
        for value, expected in zip(seen, rows, strict=True):
            assert_close(value, expected)
        steer(tapped, 0.5)
        assert [tokens_of(output) for output in plain(tapped, prompts, **settings)] == twice


# Many.


def test_nothing_is_left_of_many_requests(caching: Any) -> None:
    """1% fail, 1% are aborted."""
    with caching.edit() as (tracer, _):
        hidden = caching.resid_post[1].save()
        if hidden.shape[0] == 9:
            raise ValueError("nine")
    engine, sizes = caching.vllm_entrypoint.llm_engine, []
    for part in range(10):
        prompts = [random_ids(9 if i % 100 == 7 else 5, seed=i) for i in range(300)]
        enqueue(caching, prompts, [3] * 300)
        aborted = list(engine.output_processor.request_states)[50::100]
        for _ in range(part):
            engine.step()
        engine.abort_request(aborted, internal=True)
        outputs = completed(caching)
        assert sum(output.error is not None for output in outputs) <= 3
        assert all(output.saves["hidden"].shape[0] in (5, 9) for output in outputs)
        assert caching.in_flight() == 0
        assert not caching._engine.installed.outstanding
        del outputs
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    assert sizes[-1] - sizes[3] < 16 * 2**20


def test_a_speculative_engine_refuses_edits_and_generates(engines: Any) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with own_engine(engines, "llama", speculative_config=drafts) as model:
        with pytest.raises(insitu.RequestError, match="Load the model without speculative_config to install edits"):
            steer(model)
        ids = random_ids(9, seed=9)
        assert_greedy("llama", ids, tokens_of(model.generate(ids, temperature=0.0, **TOKENS)[0]))
