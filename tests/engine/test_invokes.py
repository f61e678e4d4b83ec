"""Several prompts in one trace."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

import insitu

GREEDY = {"temperature": 0.0, "max_tokens": 1}
PROMPTS = ["one two three", "hello", "the quick brown fox"]


def test_a_name_saved_in_several_invokes_is_a_list_each_entry_its_own_prompt_s(llama: Any) -> None:
    with llama.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                hidden = llama.model.layers[1].output[0].save()
                result = tracer.result.save()
    assert [rows.shape[0] for rows in hidden] == [len(one.prompt_token_ids) for one in result]
    assert [one.prompt for one in result] == PROMPTS
    for prompt, rows in zip(PROMPTS, hidden, strict=True):
        with llama.trace(prompt, **GREEDY):
            alone = llama.model.layers[1].output[0].save()
        assert torch.equal(rows, alone)


def test_a_name_saved_in_one_invoke_is_itself(llama: Any) -> None:
    with llama.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            first = llama.logits.save()
        with tracer.invoke(PROMPTS[1]):
            second = llama.logits.save()
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_containers_bound_before_the_invokes_are_shared(llama: Any) -> None:
    with llama.trace(**GREEDY) as tracer:
        rows = [].save()
        slots = ([None] * 3).save()
        table = {}.save()
        for i, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                logits = llama.logits
                rows.append(logits.argmax().item())
                slots[i] = logits
                table[prompt] = rows[-1]
    assert [slot.argmax().item() for slot in slots] == [table[prompt] for prompt in PROMPTS]
    assert sorted(rows) == sorted(table.values())
    assert all(not slot.is_inference() for slot in slots)


def test_settings_of_an_invoke_win_whatever_their_value(llama: Any) -> None:
    with llama.trace(temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        with tracer.invoke("hello", max_tokens=2):
            two = tracer.result.save()
        with tracer.invoke("hello"):
            five = tracer.result.save()
        with tracer.invoke("hello", ignore_eos=False, stop_token_ids=[five_first(llama)]):
            stopped = tracer.result.save()
    assert [len(one.outputs[0].token_ids) for one in (two, five, stopped)] == [2, 5, 1]


def five_first(model: Any) -> int:
    with model.trace("hello", **GREEDY):
        token = model.samples.save()
    return int(token)


def test_patching_from_an_earlier_invoke_needs_no_barrier(llama: Any) -> None:
    with llama.trace(**GREEDY) as tracer:
        with tracer.invoke("one two three"):
            source = llama.model.layers[1].output
            clean = llama.logits.save()
        with tracer.invoke("one two four"):
            corrupted = llama.logits.save()
        with tracer.invoke("one two four"):
            llama.model.layers[1].output = source
            patched = llama.logits.save()
    assert torch.equal(patched, clean)
    assert not torch.equal(corrupted, clean)


def test_the_latest_earlier_binding_counts_and_a_block_s_own_names_do_not(llama: Any) -> None:
    before = llama.stats()
    with llama.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                own = llama.model.layers[0].output[0]
                size = own.shape[0].save()
        with tracer.invoke("hello"):
            last = size.save()
    after = llama.stats()
    assert last == size[2]
    # The three that only share names of their own went together, the one that reads came after.
    assert after.eager_steps - before.eager_steps == 1
    assert after.plain_steps - before.plain_steps == 1


def test_several_failures_come_as_a_group_and_the_rest_is_bound(llama: Any) -> None:
    with pytest.raises(builtins.BaseExceptionGroup) as caught:
        with llama.trace(**GREEDY) as tracer:
            for i, prompt in enumerate([*PROMPTS, "last"]):
                with tracer.invoke(prompt):
                    if i == 1:
                        raise KeyError("one")
                    if i == 3:
                        raise IndexError("three")
                    token = llama.samples.item().save()
    assert [(type(error), error.invoke) for error in caught.value.exceptions] == [(KeyError, 1), (IndexError, 3)]
    assert len(token) == 4
    assert [value is None for value in token] == [False, True, False, True]


def test_an_invoke_that_needs_a_failed_one_says_so(llama: Any) -> None:
    with pytest.raises(builtins.BaseExceptionGroup) as caught:
        with llama.trace(**GREEDY) as tracer:
            with tracer.invoke("hello"):
                source = llama.model.layers[0].output[99]
            with tracer.invoke("hello"):
                llama.model.layers[0].output = source
    first, second = caught.value.exceptions
    assert isinstance(first, IndexError)
    assert isinstance(second, insitu.RequestError)
    assert str(second) == "invoke 1 was not run: it reads `source` of invoke 0, which failed"


def test_invokes_in_a_helper_function(llama: Any) -> None:
    def sweep(tracer: Any, out: list[Any]) -> None:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                out.append(llama.samples.item())

    with llama.trace(**GREEDY) as tracer:
        found = [].save()
        sweep(tracer, found)
    assert len(found) == 3


@pytest.mark.parametrize("body", ["empty", "invoke_in_a_prompt", "read_outside"])
def test_misuse_is_named(llama: Any, body: str) -> None:
    if body == "empty":
        with pytest.raises(insitu.ArgumentError, match="opened no invoke"):
            with llama.trace(**GREEDY):
                pass
    elif body == "invoke_in_a_prompt":
        with pytest.raises(insitu.ArgumentError, match="trace without a prompt"):
            with llama.trace("hello", **GREEDY) as tracer:
                with tracer.invoke("hello"):
                    pass
    else:
        with pytest.raises(insitu.OutsideTraceError, match=r"with tracer\.invoke\(prompt\)"):
            with llama.trace(**GREEDY):
                llama.logits.save()


def test_a_bad_prompt_stops_all_before_anything_runs(llama: Any) -> None:
    before = llama.stats()
    with pytest.raises(insitu.PromptError, match="empty"):
        with llama.trace(**GREEDY) as tracer:
            with tracer.invoke("hello"):
                first = llama.logits.save()
            with tracer.invoke(""):
                pass
    assert llama.stats() == before


def test_run_with_several_prompts(llama: Any) -> None:
    def block(tracer: Any) -> dict[str, Any]:
        return {"logits": llama.logits, "tokens": tracer.result.prompt_token_ids}

    found = llama.run(block, PROMPTS, **GREEDY)
    assert [sorted(one) for one in found] == [["logits", "tokens"]] * 3
    (alone,) = llama.run(block, [PROMPTS[1]], **GREEDY)
    assert torch.equal(alone["logits"], found[1]["logits"])
    assert llama.run(block, PROMPTS[1], **GREEDY)["tokens"] == alone["tokens"]


def test_run_raises_on_the_function_s_own_line(llama: Any) -> None:
    def block(tracer: Any) -> None:
        raise LookupError("here")

    with pytest.raises(LookupError) as caught:
        llama.run(block, "hello", **GREEDY)
    assert [entry.name for entry in caught.traceback] == ["test_run_raises_on_the_function_s_own_line", "block"]


def test_more_prompts_than_the_engine_runs_at_once(llama: Any) -> None:
    count = 200
    with llama.trace(**GREEDY) as tracer:
        for i in range(count):
            with tracer.invoke([1 + i % 40] * (1 + i % 7)):
                rows = llama.model.layers[2].output[0].save()
    assert [one.shape[0] for one in rows] == [1 + i % 7 for i in range(count)]


def test_code_with_a_barrier(llama: Any) -> None:
    with llama.trace(**GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("one two three"):
            source = llama.model.layers[1].output
            barrier()
            clean = llama.logits.save()
        with tracer.invoke("one two four"):
            barrier()
            llama.model.layers[1].output = source
            patched = llama.logits.save()
    assert torch.equal(patched, clean)


def test_save_in_a_function_says_what_to_write(llama: Any) -> None:
    def last() -> Any:
        return llama.logits.save()

    with pytest.raises(AttributeError) as of_run:
        llama.run(lambda tracer: last(), "hello", **GREEDY)
    with pytest.raises(AttributeError) as of_trace:
        with llama.trace("hello", **GREEDY):
            logits = last()
            print(logits)
    note = "In a function there is no x.save(): return the value, or write insitu.save(x)."
    assert of_run.value.__notes__ == of_trace.value.__notes__ == [note]
