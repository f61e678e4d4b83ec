"""Blocks that stay: what they do to requests of every entry point, what comes on outputs, and who is told of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import SamplingParams

import insitu
from tests.engine.edits import GREEDY, ONE, OTHER, PROMPT_IDS, steer, tokens_of
from tests.engine.helpers import (
    PROMPT,
    assert_close,
    assert_greedy,
    completed,
    difference,
    enqueue,
    hf,
    hf_edited,
    hf_stream,
    ids_of,
    last_logits,
    plain,
)

pytestmark = pytest.mark.usefixtures("no_edits_left")


# What runs under an edit, and what it gives.


def by_vllm(model: Any, ids: list[int]) -> Any:
    return plain(model, [ids], max_tokens=1)[0].saves["logits"]


def by_chat(model: Any, ids: list[int]) -> Any:
    text = model.tokenizer.decode(ids)
    assert model.tokenizer.encode(text) == ids
    (output,) = model.vllm_entrypoint.chat(
        [{"role": "user", "content": text}],
        SamplingParams(**ONE),
        use_tqdm=False,
        chat_template="{{ messages[0].content }}",
    )
    return output.saves["logits"]


def by_generate(model: Any, ids: list[int]) -> Any:
    return model.generate(ids, **ONE)[0].saves["logits"]


def by_trace(model: Any, ids: list[int]) -> Any:
    with model.trace(ids, **ONE) as tracer:
        own = model.logits.save()
        result = tracer.result.save()
    assert torch.equal(own, result.saves["logits"])
    return own


def by_run(model: Any, ids: list[int]) -> Any:
    return model.run(lambda tracer: model.logits, ids, **ONE)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("form", [by_vllm, by_chat, by_generate, by_trace, by_run])
def test_the_logits_of_every_entry_point_are_those_of_the_edited_model(
    request: pytest.FixtureRequest, name: str, form: Callable[[Any, list[int]], Any]
) -> None:
    model, ids = request.getfixturevalue(name), ids_of(name)
    path = "transformer.h.1.mlp" if name == "gpt2" else "model.layers.1.mlp"

    def edit(value: torch.Tensor) -> torch.Tensor:
        value[2:5] *= -2.0
        return value

    with model.edit() as (tracer, _):
        model.get(path).output[2:5] *= -2.0
        logits = model.logits.save()
    seen = hf_edited(name, ids, {path: edit})
    assert_close(form(model, ids), last_logits(seen))
    assert difference(last_logits(seen), last_logits(hf(name, ids))) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_text_is_that_of_plain_vllm_before_and_after_and_where_no_edit_applies(
    request: pytest.FixtureRequest, name: str
) -> None:
    model, ids = request.getfixturevalue(name), ids_of(name)
    before = tokens_of(plain(model, [ids], max_tokens=4, ignore_eos=True)[0])
    assert_greedy(name, ids, before)
    edit = steer(model, torch.linspace(-7, 7, 128), "steer")
    edited = [tokens_of(output) for output in (*model.generate(ids, **GREEDY), *model.generate([ids], **GREEDY))]
    assert edited[0] == edited[1] != before
    assert tokens_of(model.generate(ids, edits=[], **GREEDY)[0]) == before
    edit.clear()
    (output,) = plain(model, [ids], max_tokens=4, ignore_eos=True)
    assert tokens_of(output) == before
    assert (output.saves, output.error, output.outputs[0].saves) == ({}, None, {})


def test_edits_run_in_the_order_of_installation_and_then_the_requests_own_block(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        early = llama.resid_post[0].save()  # so that it comes to the place later than the others
        llama.resid_post[2][:] += 1
        first = llama.resid_post[2].save()
    with llama.edit() as (tracer, _):
        llama.resid_post[2][:] *= 2
        second = llama.resid_post[2].save()
    with llama.trace(PROMPT, **ONE) as tracer:
        llama.resid_post[2][:] -= 3
        own = llama.resid_post[2].save()
        result = tracer.result.save()
    stream = hf_stream("llama", ids_of("llama"))
    assert_close(result.saves["early"], stream.resid_post[0])
    assert_close(result.saves["first"], stream.resid_post[2] + 1)
    assert_close(result.saves["second"], (stream.resid_post[2] + 1) * 2)
    assert_close(own, (stream.resid_post[2] + 1) * 2 - 3)


def test_replacements_follow_each_other(gpt2: Any) -> None:
    with gpt2.edit() as (tracer, _):
        gpt2.transformer.h[1].mlp.output = gpt2.transformer.h[1].mlp.output * 3
    with gpt2.trace(PROMPT, **ONE):
        gpt2.transformer.h[1].mlp.output = gpt2.transformer.h[1].mlp.output + 1
        after = gpt2.transformer.h[1].mlp.output.save()
    assert_close(after, hf("gpt2", ids_of("gpt2"))["transformer.h.1.mlp"].output * 3 + 1)


def test_each_request_and_each_sequence_has_its_own_saves(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        drawn = []
        for _ in tracer.iter[:]:
            drawn.append(llama.samples.item())
        drawn.save()
        result = tracer.result.save()
    settings = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=4, ignore_eos=True)
    outputs = llama.vllm_entrypoint.generate([PROMPT, OTHER], settings, use_tqdm=False)
    for output in outputs:
        assert output.error is None
        assert output.saves["drawn"] == [list(each.token_ids) for each in output.outputs]
        for i, completion in enumerate(output.outputs):
            assert completion.saves == {"drawn": list(completion.token_ids)}
            assert output.saves["result"][i].outputs[i].token_ids == completion.token_ids


def test_what_a_trace_saves_is_beside_what_edits_save(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        row = llama.resid_post[1][-1].save()
        both = 1
        both.save()
    row, both = "as it was", "as it was"
    with llama.trace(PROMPT, **ONE) as tracer:
        own = llama.resid_post[1][-1].save()
        both = 2
        both.save()
        result = tracer.result.save()
    assert row == "as it was"
    assert both == 2
    for saves in (result.saves, result.outputs[0].saves):
        assert {"row", "own", "both"} == saves.keys() - {"result"}
        assert torch.equal(saves["row"], own)
        assert saves["both"] == 2


def test_chosen_by_name(llama: Any) -> None:
    for name, factor in (("x", 1), ("y", 10), (None, 100)):
        with llama.edit(name) as (tracer, _):
            llama.logits[:] += factor
    plain_logits = hf_stream("llama", ids_of("llama")).logits[-1:]

    def shift(**settings: Any) -> int:
        with llama.trace(PROMPT, **ONE, **settings):
            logits = llama.logits.save()
        return round((logits - plain_logits).mean().item())

    assert [shift(), shift(edits=None), shift(edits=[]), shift(edits=["y"]), shift(edits=["y", "x"])] == [
        111,
        111,
        100,
        110,
        111,
    ]
    with llama.trace(edits=["x"], **ONE) as tracer:
        with tracer.invoke(PROMPT):
            one = llama.logits.save()
        with tracer.invoke(PROMPT, edits=["y"]):
            other = llama.logits.save()
    assert_close(other - one, torch.full_like(one, 9.0), bound=1e-4)


def test_chosen_by_plain_requests(llama: Any) -> None:
    with llama.edit("x") as (tracer, _):
        x = llama.logits.save()
    with llama.edit("y") as (tracer, _):
        y = llama.logits.save()
    asked: list[Any] = [None, [], ["x"], ["y", "x"], ["z"], "x"]
    params = [SamplingParams(**ONE, extra_args=None if each is None else {"insitu_edits": each}) for each in asked]
    outputs = llama.vllm_entrypoint.generate([PROMPT] * len(asked), params, use_tqdm=False)
    assert [set(output.saves) for output in outputs] == [{"x", "y"}, set(), {"x"}, {"x", "y"}, set(), set()]
    assert [output.error is None for output in outputs] == [True] * 4 + [False] * 2
    assert str(outputs[4].error) == "edits: there is no installed edit `z`"
    assert str(outputs[5].error) == "insitu_edits takes a list of names of edits; got 'x'"


def test_a_caller_s_values_are_those_of_the_installation(llama: Any) -> None:
    vector, rows = torch.ones(128), [1]
    with llama.edit() as (tracer, _):
        rows.append(2)
        llama.logits
        seen = [*rows].save()
        added = vector.sum().item()
        added.save()
    vector, rows = torch.zeros(128), [7, 7]
    outputs = llama.generate([PROMPT, PROMPT], **ONE)
    assert [output.saves["seen"] for output in outputs] == [[1, 2]] * 2  # each has a list of its own
    assert [output.saves["added"] for output in outputs] == [128] * 2
    assert rows == [7, 7]


def test_a_vector_that_is_changed_later_does_not_change_the_edit(llama: Any) -> None:
    vector = torch.full((128,), 7.0)
    steer(llama, vector)
    edited = tokens_of(llama.generate(PROMPT, **GREEDY)[0])
    vector.zero_()
    assert tokens_of(llama.generate(PROMPT, **GREEDY)[0]) == edited


def test_nor_does_one_that_an_edit_reads_in_any_other_way(llama: Any) -> None:
    vector, held = torch.ones(3), {"of": [torch.ones(3)]}
    held["itself"] = held
    with llama.edit() as (tracer, edit):
        llama.logits
        seen = (vector.sum() + held["itself"]["of"][0].sum()).item()
        seen.save()
        vector += 1
    assert not edit.same_for_rows
    assert torch.equal(vector, torch.ones(3))
    vector.zero_()
    held["of"][0].zero_()
    assert llama.generate(PROMPT, **ONE)[0].saves == {"seen": 6}
    assert torch.equal(vector, torch.zeros(3))


def test_what_a_tracer_offers(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        tokens = [*tracer.tokens].save()
        where = [*tracer.positions_of("Tower")].save()
        cache = tracer.cache(["model.layers.1.mlp"]).save()
        first = llama.samples.item()
        llama.model.layers[0].next()
        second = llama.samples.item()
        tracer.stop()
        pair = [first, second].save()
        result = tracer.result.save()
    (output,) = llama.generate(PROMPT, temperature=0.0, max_tokens=9, ignore_eos=True)
    assert output.error is None
    assert "".join(output.saves["tokens"]) == PROMPT
    assert output.saves["where"] == list(llama.positions_of("Tower", PROMPT))
    assert [each.shape[0] for each in output.saves["cache"]["model.layers.1.mlp"].output] == [8, 1]
    assert output.saves["pair"] == tokens_of(output)
    assert output.outputs[0].finish_reason == "stop"


def test_requests_that_stop_by_a_text_end_their_edits(llama: Any) -> None:
    (free,) = llama.generate(PROMPT, **GREEDY)
    with llama.edit() as (tracer, _):
        steps = 0
        for _ in tracer.all():
            steps += 1
        steps.save()
    word = llama.tokenizer.decode(free.outputs[0].token_ids[1:2])
    (output,) = llama.generate(PROMPT, **{**GREEDY, "max_tokens": 9}, stop=[word])
    assert output.outputs[0].finish_reason == "stop"
    assert output.saves == {"steps": len(output.outputs[0].token_ids)}


def test_an_edit_that_skips_is_seen_by_the_blocks_beside_it(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        llama.model.layers[1].mlp.skip(torch.zeros(8, 128))
    with llama.trace(PROMPT, **ONE):
        mlp = llama.model.layers[1].mlp.output.save()
    assert not mlp.any()
    with pytest.raises(insitu.OutOfOrderError, match=r"inside `model\.layers\.1\.mlp`, which is skipped for this"):
        with llama.trace(PROMPT, **ONE):
            llama.model.layers[1].mlp.down_proj.output.save()


def test_beams_run_under_edits(llama: Any) -> None:
    from vllm.sampling_params import BeamSearchParams

    def beams() -> list[int]:
        params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
        (output,) = llama.vllm_entrypoint.beam_search([{"prompt_token_ids": ids_of("llama")}], params)
        return output.sequences[0].tokens

    before = beams()
    edit = steer(llama, 7.0)
    assert beams() != before
    edit.clear()
    assert beams() == before


# When an edit begins and ends.


@pytest.mark.in_process
def test_requests_keep_what_they_came_with(llama: Any) -> None:
    ids = ids_of("llama")
    (unedited,) = plain(llama, [ids], max_tokens=6, ignore_eos=True)
    step = llama.vllm_entrypoint.llm_engine.step
    enqueue(llama, [ids], [6])
    step()
    edit = steer(llama, 7.0)  # installed while that one runs
    assert [tokens_of(output) for output in completed(llama)] == [tokens_of(unedited)]
    (edited,) = plain(llama, [ids], max_tokens=6, ignore_eos=True)
    assert tokens_of(edited) != tokens_of(unedited)
    enqueue(llama, [ids], [6])
    step()
    enqueue(llama, [ids], [6])  # not begun
    edit.clear()
    enqueue(llama, [ids], [6])
    found = [tokens_of(output) for output in completed(llama)]
    assert found == [tokens_of(edited)] * 2 + [tokens_of(unedited)]


@pytest.mark.in_process
def test_a_cleared_edit_is_forgotten_by_the_worker(llama: Any) -> None:
    host = llama.vllm_entrypoint.collective_rpc(lambda worker: worker.insitu_host)[0]
    edit = steer(llama, 1.0)
    assert list(host.installed) == [edit.number]
    enqueue(llama, [ids_of("llama")], [3])
    edit.clear()
    edit.clear()
    assert list(host.installed) == [edit.number]
    completed(llama)
    assert not host.installed


def test_edits_are_listed(llama: Any) -> None:
    first, second = steer(llama, 1.0, "first"), steer(llama, 1.0)
    assert llama.edits() == [first, second]
    assert (first.name, second.name, first.installed) == ("first", None, True)
    assert repr(first) == f"<edit {first.number} 'first'>"
    assert second.number == first.number + 1
    first.clear()
    assert llama.edits() == [second]
    assert repr(first) == f"<edit {first.number} 'first', not installed>"
    again = steer(llama, 1.0, "first")
    assert llama.edits() == [second, again]
    llama.clear_edits()
    assert llama.edits() == []


@pytest.mark.in_process
def test_a_request_that_is_aborted_leaves_nothing(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        rows = [].save()
        for _ in tracer.all():
            rows.append(llama.resid_post[1])
    engine = llama.vllm_entrypoint.llm_engine
    for steps in (0, 1, 3):
        enqueue(llama, [ids_of("llama")] * 2, [20, 20])
        for _ in range(steps):
            engine.step()
        assert llama.in_flight() == 2 * bool(steps)
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        assert llama.in_flight() == 0
        assert not engine.has_unfinished_requests()


@pytest.mark.in_process
def test_aborted_ones_are_let_go_of_as_others_end(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        for _ in tracer.all():
            hidden = llama.resid_post[1].save()
    engine = llama.vllm_entrypoint.llm_engine
    for _ in range(3):
        enqueue(llama, [PROMPT_IDS] * 8, [20] * 8)
        engine.step()
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
    plain(llama, [PROMPT_IDS], max_tokens=1)
    host = llama.vllm_entrypoint.collective_rpc(lambda worker: worker.insitu_host)[0]
    assert host.in_flight() == 0


def test_a_streamed_request_has_its_saves_on_the_last_output(llama: Any) -> None:
    from vllm.sampling_params import RequestOutputKind

    with llama.edit() as (tracer, _):
        drawn = [].save()
        for _ in tracer.all():
            drawn.append(llama.samples.item())
    settings = SamplingParams(
        temperature=1.0, seed=5, n=2, max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    engine, outputs = llama.vllm_entrypoint.llm_engine, []
    engine.add_request("streamed", {"prompt_token_ids": PROMPT_IDS}, settings)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = {output.outputs[0].index: list(output.outputs[0].token_ids) for output in outputs}
    assert outputs[-1].request_id == "streamed"
    assert outputs[-1].saves["drawn"] == [last[0], last[1]]


def test_requests_of_one_name_have_their_own_saves(llama: Any) -> None:
    with llama.edit() as (tracer, _):
        first = llama.samples.item()
        first.save()
    engine, outputs = llama.vllm_entrypoint.llm_engine, []
    prompts = [PROMPT_IDS, ids_of("llama")]
    for ids in prompts:
        engine.add_request("same", {"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=2))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found = {tuple(each.prompt_token_ids): each for each in outputs if each.finished}
    for ids in prompts:
        assert found[tuple(ids)].saves["first"] == tokens_of(found[tuple(ids)])[0]
