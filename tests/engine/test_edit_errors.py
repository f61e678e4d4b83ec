"""What goes wrong in edits, and who is told; what is refused, and how."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

import insitu
from tests.engine.edits import GREEDY, ONE, PROMPT_IDS, steer, tokens_of
from tests.engine.helpers import (
    PROMPT,
    assert_close,
    hf_stream,
    ids_of,
    plain,
    trunk,
)

pytestmark = pytest.mark.usefixtures("no_edits_left")


# Errors.


def fail_at(model: Any, length: int) -> Any:
    with model.edit("failing") as (tracer, edit):
        for step in tracer.iter[:]:
            rows = model.resid_post[1].shape[0]
            if step == 0:
                seen = rows
                seen.save()
            if rows == length:
                raise ZeroDivisionError(f"{rows} rows")  # the line
            model.resid_post[1][:] += 7
    return edit


def test_an_error_in_an_edit_is_that_requests_alone(llama: Any) -> None:
    fail_at(llama, 8)
    prompts = [ids_of("llama"), ids_of("llama")[:5], ids_of("llama")[:6]]
    outputs = plain(llama, prompts, max_tokens=4, ignore_eos=True)
    assert [type(output.error) for output in outputs] == [ZeroDivisionError, type(None), type(None)]
    error = outputs[0].error
    assert str(error) == "8 rows"
    assert "# the line" in "".join(traceback.format_exception(error))
    assert "insitu/" not in "".join(traceback.format_exception(error))
    assert [output.saves["seen"] for output in outputs] == [8, 5, 6]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 4]
    expected = plain(llama, prompts[1:], max_tokens=4, ignore_eos=True)
    assert [tokens_of(output) for output in outputs[1:]] == [tokens_of(output) for output in expected]


def test_generate_raises_it_once_all_have_ended(llama: Any) -> None:
    fail_at(llama, 8)
    ids = ids_of("llama")
    with pytest.raises(ZeroDivisionError, match="8 rows") as caught:
        llama.generate([ids[:3], ids], **GREEDY)
    assert caught.value.invoke == 1  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="2 of 3 requests failed") as several:
        llama.generate([ids, ids[:3], ids], **GREEDY)
    assert [error.invoke for error in several.value.exceptions] == [0, 2]  # type: ignore[attr-defined]


def test_a_trace_raises_the_error_of_the_edit_that_ended_it(llama: Any) -> None:
    fail_at(llama, 8)
    with pytest.raises(ZeroDivisionError, match="8 rows"):
        with llama.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.iter[:4]:  # which would complain, had it not been cut short
                llama.resid_post[2].save()
    with pytest.raises(ZeroDivisionError, match="8 rows"):
        llama.run(lambda tracer: llama.resid_post[2], PROMPT, **GREEDY)


def test_an_error_of_the_block_itself_is_raised_as_ever(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        for _ in tracer.iter[:4]:
            llama.resid_post[2]
    with pytest.raises(KeyError, match="own"):
        with llama.trace(PROMPT, **GREEDY):
            llama.resid_post[1]
            raise KeyError("own")


def test_an_edit_whose_loop_is_longer_than_the_request_fails_it(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        for _ in tracer.iter[:3]:
            llama.resid_post[2]
    outputs = [plain(llama, [PROMPT_IDS], max_tokens=count, ignore_eos=True)[0] for count in (2, 3)]
    assert isinstance(outputs[0].error, insitu.NotReachedError)
    assert outputs[1].error is None


def test_a_place_that_never_comes_fails_the_request_and_not_the_engine(llama: Any) -> None:
    with llama.edit() as (tracer, edit):
        llama.model.layers[99].output.save()
    (output,) = plain(llama, [PROMPT_IDS], max_tokens=2)
    assert isinstance(output.error, insitu.UnknownModuleError)
    edit.clear()
    assert plain(llama, [PROMPT_IDS], max_tokens=2)[0].error is None


def test_one_sequence_of_several_may_fail(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        first = llama.samples.item()
        first.save()
        tracer.next()
        if first % 2:
            raise ValueError("odd")
        llama.samples.item()
    settings = SamplingParams(temperature=1.0, seed=11, n=6, max_tokens=3, ignore_eos=True)
    (output,) = llama.vllm_entrypoint.generate([PROMPT], settings, use_tqdm=False)
    lengths = [len(each.token_ids) for each in output.outputs]
    assert isinstance(output.error, ValueError)
    assert {(first % 2, length == 3) for first, length in zip(output.saves["first"], lengths, strict=True)} == {
        (0, True),
        (1, False),
    }


# Refusals.


def test_a_name_can_be_given_once(llama: Any) -> None:
    steer(llama, 1.0, "twice")
    with pytest.raises(insitu.ArgumentError, match="there is an edit `twice` already: clear that one first"):
        steer(llama, 1.0, "twice")
    assert len(llama.edits()) == 1


@pytest.mark.parametrize("name", ["", 3, ["a"]])
def test_a_name_is_a_text(llama: Any, name: Any) -> None:
    with pytest.raises(insitu.ArgumentError, match="the name of an edit is a text; got"):
        llama.edit(name)


def test_an_unknown_name_is_told_before_anything_runs(llama: Any) -> None:
    steer(llama, 1.0, "steering")
    before = llama.stats()
    calls: list[Callable[[], Any]] = [
        lambda: llama.generate(PROMPT, edits=["steerng"]),
        lambda: llama.trace(PROMPT, edits=["steerng"]),
        lambda: llama.trace(edits=["steerng"]),
        lambda: llama.run(lambda tracer: None, PROMPT, edits=["steerng"]),
    ]
    for call in calls:
        with pytest.raises(insitu.ArgumentError, match=r"no installed edit `steerng`; did you mean `steering`\?"):
            call()
    assert llama.stats() == before


def test_an_edit_opens_no_invokes(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        tracer.invoke("x")
    (output,) = plain(llama, [PROMPT_IDS], max_tokens=1)
    assert isinstance(output.error, insitu.ArgumentError)
    assert str(output.error) == "`tracer.invoke` is not for edits, which run beside whatever requests come"


@pytest.mark.in_process
def test_edits_are_not_for_blocks(llama: Any) -> None:
    edit = steer(llama, 0.0)
    for call in (edit.clear, llama.clear_edits, llama.edit):
        with pytest.raises(insitu.ArgumentError, match="inside a block: do it before the `with`, or after"):
            llama.run(lambda tracer, call=call: call(), PROMPT, **ONE)
    assert llama.edits() == [edit]


def test_what_an_edit_saves_in_vain_is_told_once(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        insitu.save(llama.resid_post[1] * 2)
    with pytest.warns(insitu.UnsavedWarning) as told:
        plain(llama, [PROMPT_IDS] * 3, max_tokens=1)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_of_two_that_save_under_one_name_the_later_is_seen_and_that_is_told(llama: Any) -> None:
    for value in (1, 2):
        with llama.edit() as (tracer, _):
            twice = value
            twice.save()
    with pytest.warns(insitu.UnsavedWarning, match="`twice` is saved by several edits beside one request") as told:
        outputs = plain(llama, [PROMPT_IDS] * 3, max_tokens=1)
    assert len(told) == 1
    assert [output.saves for output in outputs] == [{"twice": 2}] * 3


def test_generate_takes_one_prompt_or_several(llama: Any) -> None:
    ids = ids_of("llama")
    chat = [{"role": "user", "content": "x"}]
    assert [len(llama.generate(prompts, **ONE)) for prompts in (PROMPT, ids, [PROMPT], [ids, ids])] == [
        1,
        1,
        1,
        2,
    ]
    assert [output.prompt_token_ids for output in llama.generate([ids, PROMPT_IDS], **ONE)] == [ids, PROMPT_IDS]
    assert len(llama.generate(chat, **ONE)) == 1
    with pytest.raises(insitu.ArgumentError, match="did you mean `temperature`"):
        llama.generate(PROMPT, temprature=0)


def test_an_edit_reads_the_trunk_of_any_model(gpt2: Any) -> None:
    with gpt2.edit() as (tracer, _):
        hidden = trunk(gpt2).h[1].output.save()
    (output,) = gpt2.generate(PROMPT, **ONE)
    assert_close(output.saves["hidden"], hf_stream("gpt2", ids_of("gpt2")).resid_post[1])


def test_a_model_is_checked_without_edits(llama: Any) -> None:
    steer(llama, 1.0)
    with pytest.raises(insitu.ArgumentError, match="clear its edits first"):
        llama.check()
