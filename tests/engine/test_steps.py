"""Steps of generation: loops, single steps, stopping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import insitu

PROMPT = "hello there"
LONG = {"temperature": 0.0, "ignore_eos": True}


def drawn(model: Any, count: int) -> list[int]:
    with model.trace(PROMPT, max_tokens=count, **LONG) as tracer:
        result = tracer.result.save()
    return list(result.outputs[0].token_ids)


def test_a_loop_runs_once_a_step_and_code_after_it_runs(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=5, **LONG) as tracer:
        shapes, tokens, after = [].save(), [].save(), [].save()
        for step in tracer.iter[:]:
            shapes.append(llama.model.layers[1].output[0].shape[0])
            tokens.append(llama.samples.item())
        after.append(step)
        result = tracer.result.save()
    assert shapes == [len(result.prompt_token_ids), 1, 1, 1, 1]
    assert tokens == list(result.outputs[0].token_ids) == drawn(llama, 5)
    assert after == [4]


@pytest.mark.parametrize(
    ("index", "steps"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(3, None), [3, 4]),
        (slice(-2, None), [3, 4]),
        (slice(0, -3), [0, 1]),
        ([0, 3], [0, 3]),
        (2, [2]),
        (-1, [4]),
        (slice(2, 2), []),
    ],
)
def test_indices(llama: Any, index: Any, steps: list[int]) -> None:
    with llama.trace(PROMPT, max_tokens=5, **LONG) as tracer:
        seen = [].save()
        for step in tracer.iter[index]:
            seen.append((step, llama.samples.item()))
    tokens = drawn(llama, 5)
    assert seen == [(step, tokens[step]) for step in steps]


def test_each_step_reads_its_own_values(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=4, **LONG) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(llama.resid_post[2][-1])
        ids = tracer.result.save()
    whole = list(ids.prompt_token_ids) + list(ids.outputs[0].token_ids)
    for step, row in enumerate(rows):
        with llama.trace(whole[: len(ids.prompt_token_ids) + step], max_tokens=1, temperature=0.0):
            want = llama.resid_post[2][-1].save()
        assert (row - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)


def test_with_is_the_same_as_the_loop(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=4, **LONG) as tracer:
        seen = [].save()
        with tracer.iter[1:3] as step:
            token = llama.samples.item().save()
            seen.append((step, token))
        late = step.save()
    tokens = drawn(llama, 4)
    assert seen == [(1, tokens[1]), (2, tokens[2])]
    assert token == tokens[2]
    assert late == 2


def test_moving_on_by_hand(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=4, **LONG) as tracer:
        first = llama.samples.item().save()
        tracer.next()
        second = llama.samples.item().save()
        rows = llama.model.layers[0].next().output[0].save()
        third = llama.samples.item().save()
    assert [first, second, third] == drawn(llama, 3)
    assert rows.shape == (1, 128)


def test_loops_with_break_continue_enumerate_zip_while_and_nesting(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=6, **LONG) as tracer:
        seen = [].save()
        for count, step in enumerate(tracer.iter[:]):
            if step == 1:
                continue
            if step == 3:
                break
            seen.append((count, llama.samples.item()))
        for step, name in zip(tracer.iter[4:], "ab", strict=False):
            seen.append((name, llama.samples.item()))
    tokens = drawn(llama, 6)
    assert seen == [(0, tokens[0]), (2, tokens[2]), ("a", tokens[4]), ("b", tokens[5])]


def test_a_condition_on_a_value_at_each_step(llama: Any) -> None:
    with llama.trace(PROMPT, max_tokens=8, **LONG) as tracer:
        branches = [].save()
        for _ in tracer.iter[:]:
            high = llama.model.layers[1].output[0][-1, 0] > 0
            branches.append(bool(high))
            if high:
                llama.model.layers[2].output[0][:] = 0
    assert set(branches) == {True, False}


def test_a_bounded_loop_that_outlives_the_request_says_how_many_steps_there_were(llama: Any) -> None:
    with pytest.raises(insitu.NotReachedError, match=r"to reach step 3, but the request ended after 3 steps"):
        with llama.trace(PROMPT, max_tokens=3, **LONG) as tracer:
            for _ in tracer.iter[0:5]:
                llama.samples


def test_next_past_the_end_is_an_error_at_the_read(llama: Any) -> None:
    with pytest.raises(insitu.NotReachedError, match=r"`model\.samples` of step 2 was not reached.*after 2 steps"):
        with llama.trace(PROMPT, max_tokens=2, **LONG) as tracer:
            tracer.next()
            tracer.next()
            llama.samples


@pytest.mark.parametrize(
    ("index", "text"),
    [([2, 1], "rising order"), (slice(None, None, -1), "steps go forwards"), (-9, "before the first of 4 steps")],
)
def test_indices_that_make_no_sense(llama: Any, index: Any, text: str) -> None:
    with pytest.raises(insitu.ArgumentError, match=text):
        with llama.trace(PROMPT, max_tokens=4, **LONG) as tracer:
            for _ in tracer.iter[index]:
                pass


def test_counting_from_the_end_needs_a_known_end(llama: Any) -> None:
    with pytest.raises(insitu.ArgumentError, match="set ignore_eos=True with max_tokens"):
        with llama.trace(PROMPT, max_tokens=4, temperature=0.0) as tracer:
            for _ in tracer.iter[-1]:
                pass


def test_a_step_that_has_gone_by(llama: Any) -> None:
    with pytest.raises(insitu.OutOfOrderError, match="step 0 has gone by"):
        with llama.trace(PROMPT, max_tokens=4, **LONG) as tracer:
            for _ in tracer.iter[1:3]:
                llama.samples
            for _ in tracer.iter[:]:
                llama.samples


@pytest.mark.parametrize("settings", [{}, {"min_tokens": 20}, {"ignore_eos": True}], ids=str)
def test_stop_ends_the_request_at_that_step(llama: Any, settings: dict[str, Any]) -> None:
    with llama.trace(PROMPT, max_tokens=3, **LONG) as tracer:
        plain = tracer.result.outputs[0].save()
    with llama.trace(PROMPT, max_tokens=30, temperature=0.0, **settings) as tracer:
        for step in tracer.all():
            llama.model.layers[1].output
            if step == 2:
                tracer.stop()
        result = tracer.result.save()
    (completion,) = result.outputs
    assert completion.token_ids == plain.token_ids
    assert completion.text == plain.text
    assert completion.finish_reason == "stop"


def test_stop_in_one_of_four_requests(llama: Any) -> None:
    with llama.trace(max_tokens=5, **LONG) as tracer:
        for i in range(4):
            with tracer.invoke(PROMPT):
                llama.logits
                if i == 1:
                    tracer.stop()
                result = tracer.result.save()
    assert [len(one.outputs[0].token_ids) for one in result] == [5, 1, 5, 5]


def test_a_prompt_of_one_token_begins_with_its_prefill(llama: Any) -> None:
    with llama.trace([7], max_tokens=3, **LONG) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(llama.embed)
    assert [row.shape for row in rows] == [(1, 128)] * 3
    assert not torch.equal(rows[0], rows[1])
