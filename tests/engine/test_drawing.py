"""Logits and samples: what is written there decides what is drawn, and what generation goes on from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine.helpers import (
    PROMPT,
    hf_stream,
    ids_of,
    own_engine,
    plain,
)


def continuation(name: str, first: int, tokens: int) -> list[int]:
    """The ids that transformers goes on with once `first` was drawn."""
    return [first, *models.greedy(models.tiny(name), [*ids_of(name), first], tokens - 1)]


def test_a_banned_token_is_not_drawn(name: str, model: Any) -> None:
    logits = hf_stream(name, ids_of(name)).logits[-1]
    best, second = logits.topk(2).indices.tolist()
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        model.logits[:, best] = -torch.inf
        drawn = model.samples.save()
        result = tracer.result.save()
    assert drawn.tolist() == [second]
    assert list(result.outputs[0].token_ids) == continuation(name, second, 5)


def test_logits_are_replaced(name: str, model: Any) -> None:
    worst = hf_stream(name, ids_of(name)).logits[-1].argmin().item()
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        model.logits = -model.logits
        after = model.logits.save()
        result = tracer.result.save()
    assert after.argmax().item() == worst
    assert list(result.outputs[0].token_ids) == continuation(name, worst, 4)


@pytest.mark.parametrize("way", ["item", "fill", "replace", "int32"])
def test_generation_goes_on_from_a_forced_token(name: str, model: Any, way: str) -> None:
    forced = 77
    with model.trace(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
        if way == "item":
            model.samples[0] = forced
        elif way == "fill":
            model.samples.fill_(forced)
        elif way == "replace":
            model.samples = torch.tensor([forced])
        else:
            model.samples = torch.tensor([forced], dtype=torch.int32)
        drawn = model.samples.save()
        result = tracer.result.save()
    assert drawn.tolist() == [forced]
    assert list(result.outputs[0].token_ids) == continuation(name, forced, 8)
    # vLLM holds back the bytes of a character that is not complete yet.
    assert result.outputs[0].text == model.tokenizer.decode(result.outputs[0].token_ids).rstrip("\ufffd")


def test_forced_tokens_in_a_batch_stay_with_their_requests(name: str, model: Any) -> None:
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        for i in range(6):
            with tracer.invoke(PROMPT):
                if i % 2:
                    model.samples[:] = 100 + i
                result = tracer.result.save()
    natural = models.greedy(models.tiny(name), ids_of(name), 4)
    for i, output in enumerate(result):
        wanted = continuation(name, 100 + i, 4) if i % 2 else natural
        assert list(output.outputs[0].token_ids) == wanted


def test_a_forced_end_token_ends_the_request(llama: Any) -> None:
    end = llama.tokenizer.eos_token_id
    with llama.trace(PROMPT, temperature=0.0, max_tokens=8) as tracer:
        llama.samples[0] = end
        result = tracer.result.save()
    assert result.outputs[0].finish_reason == "stop"
    assert list(result.outputs[0].token_ids) == [end]


@pytest.mark.parametrize("token", [-1, 512, 10**6])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(llama: Any, token: int) -> None:
    def block(tracer: Any) -> None:
        llama.samples[0] = token
        tracer.result

    before = plain(llama, [ids_of("llama")], max_tokens=4)
    with pytest.raises(insitu.WriteError, match=str(token)):
        llama.run(block, PROMPT, temperature=0.0, max_tokens=4)
    after = plain(llama, [ids_of("llama")], max_tokens=4)
    assert after[0].outputs[0].token_ids == before[0].outputs[0].token_ids


@pytest.mark.parametrize("place", ["logits", "samples"])
def test_another_shape_of_logits_and_samples_is_refused(llama: Any, place: str) -> None:
    def block(tracer: Any) -> None:
        setattr(llama, place, torch.zeros(2, 3))

    with pytest.raises(insitu.WriteError, match=rf"model\.{place}.*\(2, 3\)"):
        llama.run(block, PROMPT, max_tokens=1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "seed": 3, "top_k": 5, "repetition_penalty": 1.5}])
@pytest.mark.parametrize("logprobs", [0, 3])
def test_the_logprobs_of_an_id_written_are_the_models(
    name: str, model: Any, logprobs: int, settings: dict[str, Any]
) -> None:
    forced, ids = 77, ids_of(name)
    with model.trace(**{"temperature": 0.0, **settings}, max_tokens=2, ignore_eos=True, logprobs=logprobs) as tracer:
        with tracer.invoke(PROMPT):
            model.samples[0] = forced
            result = tracer.result.save()
        with tracer.invoke(PROMPT):
            result = tracer.result.save()
    for request, first in zip(result, (forced, result[1].outputs[0].token_ids[0]), strict=True):
        (completion,) = request.outputs
        drawn = list(completion.token_ids)
        assert drawn[0] == first
        total = 0.0
        for step, token in enumerate(drawn):
            wanted = hf_stream(name, [*ids, *drawn[:step]]).logits[-1].log_softmax(-1)
            found = completion.logprobs[step]
            assert found[token].logprob == pytest.approx(wanted[token].item(), abs=1e-4)
            assert found[token].rank == int((wanted >= wanted[token]).sum())
            assert set(found) == {token, *wanted.topk(logprobs).indices.tolist()}
            total += wanted[token].item()
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_an_id_written_that_logprobs_can_t_follow_is_refused(engines: Any) -> None:
    with own_engine(engines, "llama", logprobs_mode="processed_logprobs") as model:
        with pytest.raises(insitu.RequestError, match="can't be written with logprobs asked for and logprobs_mode"):
            with model.trace(PROMPT, max_tokens=2, logprobs=1):
                model.samples[0] = 77
        with model.trace(PROMPT, max_tokens=2) as tracer:
            model.samples[0] = 77
            result = tracer.result.save()
        assert result.outputs[0].token_ids[0] == 77
