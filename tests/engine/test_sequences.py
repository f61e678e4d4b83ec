"""Several sequences of one prompt (`n`): a block for each, and a list of what each saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.helpers import (
    PROMPT,
    assert_close,
    hf_stream,
    ids_of,
)
from tests.models import WIDTH


def test_a_saved_name_comes_back_once_for_each_sequence(llama: Any) -> None:
    with llama.trace(PROMPT, n=2, temperature=1.0, seed=11, max_tokens=5, ignore_eos=True) as tracer:
        hidden = llama.resid_post[1].save()
        drawn = llama.samples.item().save()
        result = tracer.result.save()
    assert isinstance(hidden, list)
    assert len(hidden) == len(drawn) == len(result) == 2
    for i in range(2):
        assert_close(hidden[i], hf_stream("llama", ids_of("llama")).resid_post[1])
        assert result[i].outputs[i].token_ids[0] == drawn[i]
    assert hidden[0].untyped_storage().data_ptr() != hidden[1].untyped_storage().data_ptr()


def test_each_sequence_has_its_own_values_and_edits(llama: Any) -> None:
    ids = ids_of("llama")
    with llama.trace(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True) as tracer:
        drawn, logits = [].save(), [].save()
        for step in tracer.iter[:]:
            logits.append(llama.logits[0])
            if step == 1:
                llama.samples[0] = drawn[0] // 2 + 10  # depends on what this sequence has drawn
            drawn.append(llama.samples.item())
        result = tracer.result.save()
    assert [len(each) for each in drawn] == [4, 4, 4]
    assert len({tuple(each) for each in drawn}) > 1
    for i in range(3):
        assert drawn[i] == list(result[i].outputs[i].token_ids)
        assert drawn[i][1] == drawn[i][0] // 2 + 10
        wanted = hf_stream("llama", [*ids, *drawn[i][:-1]]).logits[-4:]
        assert_close(torch.stack(logits[i]), wanted, f"sequence {i}")


def test_each_completion_has_the_saves_of_its_sequence(llama: Any) -> None:
    with llama.trace(PROMPT, n=3, temperature=1.0, seed=11, max_tokens=2, ignore_eos=True) as tracer:
        drawn = llama.samples.item().save()
        result = tracer.result.save()
    assert [[(completion.token_ids[0], completion.saves) for completion in output.outputs] for output in result] == [
        [(token, {"drawn": token}) for token in drawn]
    ] * 3


def test_a_function_of_several_sequences(llama: Any) -> None:
    found = llama.run(lambda tracer: llama.samples.item(), PROMPT, n=2, temperature=1.0, seed=3, max_tokens=2)
    assert len(found) == 2
    assert all(isinstance(token, int) for token in found)


def test_sequences_of_several_invokes(llama: Any) -> None:
    with llama.trace(temperature=1.0, seed=2, max_tokens=2, ignore_eos=True) as tracer:
        for count in (2, 1, 3):
            with tracer.invoke(PROMPT, n=count):
                drawn = llama.samples.item().save()
                result = tracer.result.save()
    assert [len(each) if isinstance(each, list) else 1 for each in drawn] == [2, 1, 3]
    for i, count in enumerate((2, 1, 3)):
        tokens = drawn[i] if isinstance(drawn[i], list) else [drawn[i]]
        output = result[i][0] if isinstance(result[i], list) else result[i]
        assert tokens == [sequence.token_ids[0] for sequence in output.outputs]
        assert len(tokens) == count


def test_an_error_in_one_sequence_is_the_requests(llama: Any) -> None:
    class UnluckyError(Exception):
        pass

    seen: list[int] = []

    def block(tracer: Any) -> None:
        seen.append(llama.samples.item())
        if len(seen) == 2:
            raise UnluckyError("the second to draw")
        tracer.result

    with pytest.raises(UnluckyError, match="second"):
        llama.run(block, PROMPT, n=3, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)
    assert len(seen) == 3
    assert llama.in_flight() == 0
    assert llama.run(lambda tracer: llama.resid_post[1], PROMPT, max_tokens=1).shape[1] == WIDTH
