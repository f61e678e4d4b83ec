"""What a block can't do once for many requests, each request's own run does: as if there were no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from insitu import VLLM, UnsavedWarning
from tests.engine.cohorts import GREEDY, PROMPTS, alone_and_together, counted, same

pytestmark = pytest.mark.usefixtures("several_threads")

COUNT = 0


def adds_to_a_tensor(model: VLLM) -> Callable[[Any], Any]:
    count = torch.zeros(2)

    def block(tracer: Any) -> Any:
        last = model.resid_post[1][-1]
        count[0] += 1
        count[1:].add_(2)
        return last * count[0] + count[1]

    return block


def draws(model: VLLM) -> Callable[[Any], Any]:
    half = torch.full((1,), 0.5)
    torch.manual_seed(0)
    return lambda tracer: model.resid_post[1] * half.bernoulli()[0]


def counts_in_a_global(model: VLLM) -> Callable[[Any], Any]:
    global COUNT
    COUNT = 0

    def block(tracer: Any) -> Any:
        global COUNT
        last = model.resid_post[1][-1]
        COUNT += 1
        return last * COUNT

    return block


def counts_in_a_cell(model: VLLM) -> Callable[[Any], Any]:
    count = 0

    def block(tracer: Any) -> Any:
        nonlocal count
        last = model.resid_post[1][-1]
        count += 1
        return last * count

    return block


def catches(model: VLLM) -> Callable[[Any], Any]:
    seen: list[int] = [1]

    def block(tracer: Any) -> Any:
        last = model.resid_post[1][-1]
        try:
            seen.append(2)
        except:  # noqa: E722
            return last * 2
        return last * len(seen)

    return block


def matches_a_list(model: VLLM) -> Callable[[Any], Any]:
    layers = [0]

    def block(tracer: Any) -> Any:
        match layers:
            case list():
                return model.resid_post[0]
        return model.resid_post[1]

    return block


def matches_a_value(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        match model.model.layers[1].output:
            case [hidden, _]:
                return hidden
        return model.logits

    return block


def tells_objects_apart(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        hidden = model.resid_post[1]
        return model.resid_post[1] is hidden, hidden[:] is hidden, hidden.float() is hidden

    return block


def writes_a_list_as_text(model: VLLM) -> Callable[[Any], Any]:
    layers = [1]
    return lambda tracer: (model.resid_post[1], "%s" % layers)  # noqa: UP031


def asks_for_the_class(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: model.resid_post[1].__class__.__name__


def goes_backwards(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: model.resid_post[1][::-1]


NOT_TOGETHER = [
    adds_to_a_tensor, counts_in_a_global, counts_in_a_cell, catches, matches_a_list, matches_a_value,
    pytest.param(draws, marks=pytest.mark.in_process),  # the worker's generator is not seeded
    tells_objects_apart, writes_a_list_as_text, asks_for_the_class, goes_backwards,
]  # fmt: skip


@pytest.mark.parametrize("made", NOT_TOGETHER)
def test_what_it_would_tell_or_change_is_as_alone(llama: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]) -> None:
    def work() -> Any:
        return llama.run(made(llama), PROMPTS, **GREEDY)

    alone_and_together(llama, work)
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert counts[0] == 0


def test_a_value_that_is_a_key_comes_home_as_one(llama: VLLM) -> None:
    alone, together = alone_and_together(
        llama, lambda: [list(each) for each in llama.run(lambda tracer: {llama.resid_post[1]: 1}, PROMPTS, **GREEDY)]
    )
    assert same(alone, together)


@pytest.mark.parametrize("row_number", [2, 1, -2])
def test_logits_have_one_row_whatever_is_added(llama: VLLM, row_number: int) -> None:
    def work() -> Any:
        vectors = [torch.full((1,), float(number)) for number in range(len(PROMPTS))]
        with llama.trace(**GREEDY) as tracer:
            for prompt, v in zip(PROMPTS, vectors, strict=True):
                with tracer.invoke(prompt):
                    row = (v + llama.logits)[row_number].save()
        return tracer, row  # pyright: ignore[reportPossiblyUnboundVariable]

    alone, together = alone_and_together(llama, work)
    assert [type(error) for error in together.exceptions] == [IndexError] * len(PROMPTS)
    assert same(alone, together)


def test_a_part_sees_a_stream_written_over_it(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    part = llama.model.layers[1].output[0][-1].save()
                    llama.resid_post[1] = llama.resid_post[1] * 2
        return part  # pyright: ignore[reportPossiblyUnboundVariable]

    alone, together = alone_and_together(llama, work)
    assert len(together) == len(PROMPTS)
    assert same(alone, together)


@pytest.mark.parametrize("changing", [0, len(PROMPTS) - 1])
def test_what_another_block_changes_is_seen(llama: VLLM, changing: int) -> None:
    def work() -> Any:
        factor, seen = torch.ones(1), [1]
        with llama.trace(**GREEDY) as tracer:
            for number, prompt in enumerate(PROMPTS):
                if number == changing:
                    with tracer.invoke(prompt):
                        _ = llama.resid_post[0]
                        factor.fill_(3)
                        seen.append(2)
                else:
                    with tracer.invoke(prompt):
                        row = (llama.resid_post[1][-1] * factor).save()
                        more = (llama.resid_post[2][-1] * len(seen)).save()
        return row, more  # pyright: ignore[reportPossiblyUnboundVariable]

    alone, together = alone_and_together(llama, work)
    assert same(alone, together)


def test_what_is_saved_in_vain_is_told(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    (llama.resid_post[1] * 2).save()

    with pytest.warns(UnsavedWarning) as told:
        alone_and_together(llama, work)
    assert len(told) == 3


def test_a_place_that_goes_by_requests_is_not_taken_to_go_by_tokens(llama: VLLM) -> None:
    processed = llama.logits_processor
    llama.run(lambda tracer: processed.output, [5], **GREEDY)
    alone, together = alone_and_together(llama, lambda: llama.run(lambda tracer: processed.output, PROMPTS, **GREEDY))
    assert len(together) == len(PROMPTS)
    assert same(alone, together)


def test_an_error_gives_the_requests_own_shape(llama: VLLM) -> None:
    def work() -> Any:
        three = torch.zeros(3)
        with llama.trace(**GREEDY) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    llama.resid_post[1][:] = three
        return tracer

    alone, together = alone_and_together(llama, work)
    assert "[5, 128]" in str(together.exceptions[0])
    assert same(alone, together)


def test_a_tensor_of_the_callers_is_calculated_with(llama: VLLM) -> None:
    directions = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))

    def block(tracer: Any) -> Any:
        for layer in range(directions.shape[0]):
            llama.resid_post[layer][:] += directions[layer] / directions[layer].norm() * 2
        return llama.logits

    alone_and_together(llama, lambda: llama.run(block, PROMPTS, **GREEDY))
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: llama.run(block, PROMPTS, **GREEDY))
    assert same(alone, together)
    assert counts[0] == len(PROMPTS)
