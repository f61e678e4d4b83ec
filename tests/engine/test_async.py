"""Traces that are awaited: streamed outputs, what is saved, many at once, and the ways to leave early."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import insitu
from insitu import recipes
from tests import models
from tests.engine.helpers import PROMPT, Run, assert_close, hf_stream, ids_of

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY = {"temperature": 0.0, "max_tokens": 1}
LONG = {"temperature": 0.0, "max_tokens": 150, "ignore_eos": True}


def engine(**settings: Any) -> Any:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 64, **settings}
    return insitu.VLLM(models.tiny("llama"), mode="async", **settings)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with engine(dispatch=True) as made:
        yield made


def test_each_step_is_streamed_and_the_last_has_what_was_saved(model: Any, run: Run) -> None:
    async def main() -> tuple[list[Any], Any]:
        with model.trace(PROMPT, temperature=0.0, max_tokens=4) as tracer:
            hidden = model.resid_post[2].save()
            result = tracer.result.save()
        outputs = [(output, len(output.outputs[0].token_ids)) async for output in tracer.backend]
        assert "hidden" not in locals()
        return outputs, tracer.backend.saves

    streamed, saves = run(main())
    outputs, lengths = zip(*streamed, strict=True)
    assert sorted(set(lengths)) == list(lengths)  # vLLM joins steps that nobody has asked for in time
    assert lengths[-1] == 4
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.invoke for output in outputs} == {0}
    assert_close(outputs[-1].saves["hidden"], hf_stream("llama", ids_of("llama")).resid_post[2])
    assert outputs[-1].saves["result"].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
    assert saves["hidden"] is outputs[-1].saves["hidden"]
    outputs[-1].saves["hidden"] += 1  # an ordinary tensor


def test_awaited_it_gives_the_last_output(model: Any, run: Run) -> None:
    async def main() -> Any:
        with model.trace(PROMPT, n=2, temperature=1.0, seed=3, max_tokens=2, ignore_eos=True) as tracer:
            drawn = model.samples.item().save()
        return await tracer.backend

    output = run(main())
    assert output.finished
    assert output.saves["drawn"] == [completion.token_ids[0] for completion in output.outputs]
    assert [completion.saves["drawn"] for completion in output.outputs] == output.saves["drawn"]


def test_async_with_binds_what_was_saved(model: Any, run: Run) -> None:
    async def main() -> Any:
        rows: list[Any] = []
        kept = "as before"
        async with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
            kept = "not saved"
            for step in tracer.iter[:]:
                rows.append(model.logits)
            rows.save()
            result = tracer.result.save()
        return rows, kept, result

    rows, kept, result = run(main())
    assert [row.argmax().item() for row in rows] == result.outputs[0].token_ids
    assert kept == "as before"


def test_invokes_are_told_by_their_index(model: Any, run: Run) -> None:
    prompts = [PROMPT, "Water boils at", "One two three four five six"]

    async def main() -> tuple[set[int], list[Any], Any]:
        with model.trace(temperature=0.0, max_tokens=3) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    hidden = model.resid_post[1].save()
        seen = {output.invoke async for output in tracer.backend}
        with model.trace(**GREEDY) as again:
            for prompt in prompts:
                with again.invoke(prompt):
                    hidden = model.resid_post[1].save()
        return seen, await again.backend, tracer.backend.saves

    seen, last, saves = run(main())
    assert seen == {0, 1, 2}
    assert [output.invoke for output in last] == [0, 1, 2]
    for prompt, output, saved in zip(prompts, last, saves["hidden"], strict=True):
        wanted = hf_stream("llama", ids_of("llama", prompt)).resid_post[1]
        assert_close(output.saves["hidden"], wanted)
        assert_close(saved, wanted)


def test_an_invoke_runs_after_the_one_whose_name_it_reads(model: Any, run: Run) -> None:
    async def main() -> Any:
        async with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                clean = model.resid_post[1][-1]
                before = model.logits.save()
            with tracer.invoke("Water boils at"):
                model.resid_post[1][-1] = clean
                patched = model.resid_post[1][-1].save()
        return patched

    assert_close(run(main()), hf_stream("llama", ids_of("llama")).resid_post[1][-1])


def test_an_invoke_that_fails_takes_no_other_along(model: Any, run: Run) -> None:
    async def main() -> tuple[Any, BaseException, list[int]]:
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                raise KeyError("by hand")
            with tracer.invoke(PROMPT):
                logits = model.logits.save()
        finished = []
        try:
            async for output in tracer.backend:
                finished.append(output.invoke)
        except KeyError as error:
            return tracer.backend.saves, error, finished
        raise AssertionError

    saves, error, finished = run(main())
    assert saves["logits"].shape[0] == 1
    assert error.invoke == 0
    assert finished == [1]


@pytest.mark.parametrize("awaited", ["async with", "await", "async for", "run"])
def test_errors_show_the_user_s_lines_alone(model: Any, run: Run, awaited: str) -> None:
    async def main() -> None:
        if awaited == "async with":
            async with model.trace(PROMPT, **GREEDY):
                model.logits.nonsense()
        elif awaited == "run":
            await model.run(lambda tracer: model.logits.nonsense(), PROMPT, **GREEDY)
        else:
            with model.trace(PROMPT, **GREEDY) as tracer:
                model.logits.nonsense()
            if awaited == "await":
                await tracer.backend
            async for output in tracer.backend:
                pass

    async def count() -> int:
        return await model.in_flight()

    with pytest.raises(AttributeError, match="nonsense") as caught:
        run(main())
    frames = traceback.extract_tb(caught.value.__traceback__)
    lines = [frame for frame in frames if frame.name in ("main", "<lambda>") and frame.line]
    assert lines[-1].line is not None
    assert "nonsense" in lines[-1].line
    assert not [frame for frame in frames if "/insitu/engine/" in frame.filename or "/insitu/block/" in frame.filename]
    assert run(count()) == 0


def test_many_at_once_are_each_other_s_company(model: Any, run: Run) -> None:
    prompts = [PROMPT[: 4 + number] for number in range(30)]

    async def one(prompt: str) -> Any:
        async with model.trace(prompt, temperature=0.0, max_tokens=5) as tracer:
            model.resid_post[0] *= 1.5
            hidden = model.resid_post[2].save()
            for step in tracer.iter[1:]:
                model.resid_post[1] *= 0.5
        return hidden

    async def main() -> tuple[list[Any], list[Any], int]:
        together = await asyncio.gather(*map(one, prompts))
        alone = [await one(prompt) for prompt in prompts[::7]]
        return together, alone, await model.in_flight()

    together, alone, left = run(main())
    assert all(torch.equal(a, b) for a, b in zip(together[::7], alone, strict=True))
    assert left == 0


async def leave_by_break(tracer: Any) -> None:
    async for output in tracer.backend:
        break


async def leave_by_raising(tracer: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async for output in tracer.backend:
            1 / 0


async def leave_by_aclose(tracer: Any) -> None:
    stream = aiter(tracer.backend)
    await anext(stream)
    await tracer.backend.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_cancelling(tracer: Any) -> None:
    async def read() -> None:
        await tracer.backend

    task = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timing_out(tracer: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.ensure_future(tracer.backend), 0.01)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_raising, leave_by_aclose, leave_by_cancelling, leave_by_timing_out]
)
@pytest.mark.parametrize("invokes", [0, 3])
def test_who_leaves_early_leaves_nothing_behind(model: Any, run: Run, leave: Any, invokes: int) -> None:
    ended: list[str] = []

    async def main() -> tuple[int, int]:
        if invokes:
            with model.trace(**LONG) as tracer:
                for number in range(invokes):
                    with tracer.invoke(PROMPT):
                        for step in tracer.iter[:]:
                            hidden = model.resid_post[1].save()
        else:
            with model.trace(PROMPT, **LONG) as tracer:
                for step in tracer.iter[:]:
                    hidden = model.resid_post[1].save()
        await leave(tracer)
        left = await model.in_flight()
        return left, len(model.vllm_entrypoint.output_processor.request_states)

    assert run(main()) == (0, 0)


def test_an_async_with_that_is_cancelled_leaves_nothing_behind(model: Any, run: Run) -> None:
    async def trace() -> None:
        async with model.trace(PROMPT, **LONG) as tracer:
            for step in tracer.iter[:]:
                hidden = model.resid_post[1].save()

    async def main() -> list[int]:
        counts = []
        for seconds in (0, 0.002, 0.005, 0.01, 0.03):
            task = asyncio.create_task(trace())
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.wait([task])
            counts.append(await model.in_flight())
        return counts

    assert run(main()) == [0] * 5


def test_a_request_aborted_by_others_is_an_error(model: Any, run: Run) -> None:
    async def main() -> int:
        with model.trace(PROMPT, **LONG) as tracer:
            hidden = model.resid_post[1].save()
        with pytest.raises(insitu.RequestError, match="aborted before it ended"):
            async for output in tracer.backend:
                await model.vllm_entrypoint.abort(output.request_id)
        return await model.in_flight()

    assert run(main()) == 0


def test_function_form(model: Any, run: Run) -> None:
    rows: list[Any] = []

    def block(tracer: Any) -> int:
        rows.append(model.logits.shape)
        return model.samples.item()

    async def main() -> tuple[Any, Any]:
        return await model.run(block, PROMPT, **GREEDY), await model.run(block, [PROMPT, "Water boils at"], **GREEDY)

    one, two = run(main())
    assert two[0] == one
    assert len(rows) == 3  # what the block changes is changed here


def test_plain_requests_run_beside(model: Any, run: Run) -> None:
    from vllm import SamplingParams

    async def plain(number: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        outputs = model.vllm_entrypoint.generate({"prompt_token_ids": ids_of("llama")}, params, f"plain {number}")
        last = [output async for output in outputs][-1]
        return list(last.outputs[0].token_ids)

    async def traced() -> None:
        async with model.trace(PROMPT, **LONG):
            model.resid_post[0][:] = 0

    async def main() -> tuple[list[int], list[list[int]]]:
        alone = await plain(0)
        *beside, _ = await asyncio.gather(*map(plain, range(1, 5)), traced())
        return alone, beside

    alone, beside = run(main())
    assert beside == [alone] * 4


def test_what_the_model_tells(model: Any, run: Run) -> None:
    async def main() -> tuple[Any, Any, str]:
        before = await model.stats()
        async with model.trace(PROMPT, temperature=0.0, max_tokens=3):
            logits = model.logits.save()
        return before, await model.stats(), str((await model.listing(model.model.layers[0].mlp)).render())

    before, after, listing = run(main())
    assert after.plain_steps + after.eager_steps == before.plain_steps + before.eager_steps + 3
    assert "gate_up_proj" in listing
    assert (len(model.resid_post), len(model.model.layers), await_twice(model, run)) == (4, 4, model)
    assert "LlamaDecoderLayer" in repr(model)
    assert model.tokenizer.decode([5])
    assert type(model.vllm_entrypoint).__name__ == "AsyncLLM"


def await_twice(model: Any, run: Run) -> Any:
    async def main() -> Any:
        return await (await model).dispatch()

    return run(main())


def test_check(model: Any, run: Run) -> None:
    report = run(model.check(reference=False, show=False))
    assert report.passed
    assert len(report.rows) > 10


def test_values_larger_than_a_message_travel_in_shared_memory(model: Any, run: Run) -> None:
    async def main() -> tuple[Any, int]:
        ones = torch.ones(400, 400)
        async with model.trace(PROMPT, **GREEDY):
            model.logits
            doubled = (ones * 2).save()
        async with model.trace(PROMPT, **GREEDY):
            model.logits
        return doubled, model._engine._channel._port.lent

    doubled, lent = run(main())
    assert doubled.sum() == 2 * 400 * 400
    assert lent == 0


def test_another_loop_and_another_thread_are_refused(model: Any, run: Run) -> None:
    async def trace() -> None:
        async with model.trace(PROMPT, **GREEDY):
            logits = model.logits.save()

    async def backend() -> None:
        with model.trace(PROMPT, **GREEDY) as tracer:
            logits = model.logits.save()
        await tracer.backend

    async def counts() -> None:
        await model.in_flight()

    run(counts())
    found: list[str] = []

    def other() -> None:
        for work in (trace, backend, counts):
            with pytest.raises(insitu.EngineError) as caught:
                asyncio.run(work())
            found.append(str(caught.value))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    other()
    assert len(found) == 6
    assert all("runs on another event loop" in said and "run_coroutine_threadsafe" in said for said in found)
    run(trace())


def test_a_trace_runs_once_and_says_so_if_it_never_does(model: Any, run: Run) -> None:
    async def main() -> None:
        with model.trace(PROMPT, **GREEDY) as tracer:
            logits = model.logits.save()
        await tracer.backend
        with pytest.raises(insitu.ArgumentError, match="runs once"):
            await tracer.backend

    run(main())

    async def forget() -> None:
        with model.trace(PROMPT, **GREEDY) as tracer:
            logits = model.logits.save()

    run(forget())
    with pytest.warns(insitu.UnsavedWarning, match="never ran: `await tracer.backend`") as caught:
        gc.collect()
    assert caught[0].filename == __file__


def test_what_is_refused_before_anything_runs(model: Any, run: Run) -> None:
    async def main() -> None:
        with pytest.raises(insitu.ArgumentError, match="`temprature` is not a sampling setting"):
            model.trace(PROMPT, temprature=0)
        with pytest.raises(insitu.PromptError, match="empty"):
            async with model.trace(""):
                pass
        lock = threading.Lock()
        with pytest.raises(insitu.ArgumentError, match=r"`lock` \(lock\) can't travel"):
            async with model.trace(PROMPT, **GREEDY):
                with lock:
                    logits = model.logits.save()
        with pytest.raises(insitu.ArgumentError, match="when the `with` has ended"):
            model.trace(PROMPT).backend

    run(main())
    with pytest.raises(insitu.ArgumentError, match="mode='asink'"):
        insitu.VLLM("x", mode="asink")
    with pytest.raises(insitu.ArgumentError, match="always a process of its own"):
        engine(engine="in-process").dispatch()


def test_edits_run_beside_requests_of_every_kind(model: Any, run: Run) -> None:
    from vllm import SamplingParams

    async def plain(**settings: Any) -> Any:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **settings})
        return [
            output async for output in model.vllm_entrypoint.generate({"prompt_token_ids": [5, 6, 7]}, params, "plain")
        ][-1]

    async def main() -> dict[str, Any]:
        found: dict[str, Any] = {"before": await plain()}
        async with model.edit("double") as (tracer, edit):
            model.resid_post[1] *= 2
            first = model.samples.item().save()
        found["edits"] = [one.name for one in model.edits()]
        found["plain"] = await plain()
        found["two"] = await plain(n=2, temperature=1.0, seed=5)
        found["unnamed"] = await plain(extra_args={"insitu_edits": []})
        found["generated"] = await model.generate([[5, 6, 7], PROMPT], temperature=0.0, max_tokens=3)
        async with model.trace([5, 6, 7], **GREEDY):
            doubled = model.logits.save()
        async with model.trace([5, 6, 7], edits=[], **GREEDY):
            logits = model.logits.save()
        found["apart"] = not torch.equal(doubled, logits)
        with model.trace([5, 6, 7], **LONG) as left:
            hidden = model.resid_post[2].save()
        await leave_by_break(left)
        await edit.aclear()
        found["after"] = await plain()
        found["left"] = await model.in_flight()
        return found

    found = run(main())
    assert found["edits"] == ["double"]
    first = found["plain"].outputs[0].token_ids[0]
    assert found["plain"].saves == {"first": first}
    assert len(found["two"].saves["first"]) == 2
    assert found["unnamed"].outputs[0].token_ids == found["before"].outputs[0].token_ids
    assert [len(output.outputs[0].token_ids) for output in found["generated"]] == [3, 3]
    assert found["generated"][0].saves == {"first": first}
    assert found["apart"]
    assert found["after"].outputs[0].token_ids == found["before"].outputs[0].token_ids
    assert found["left"] == 0


def test_an_edit_that_fails_fails_its_request(model: Any, run: Run) -> None:
    async def main() -> Any:
        async with model.edit() as (tracer, edit):
            raise KeyError("by hand")
        with pytest.raises(KeyError, match="by hand") as caught:
            await model.generate([PROMPT], **GREEDY)
        with pytest.raises(insitu.ArgumentError, match="aclear"):
            edit.clear()
        await model.aclear_edits()
        return await model.generate(PROMPT, **GREEDY), await model.in_flight()

    outputs, left = run(main())
    assert (len(outputs), outputs[0].error, left) == (1, None, 0)


@pytest.mark.parametrize("settings", [{}, {"engine": "workers"}], ids=["core", "workers"])
def test_a_killed_engine_is_an_error_for_all_who_wait(settings: dict[str, Any]) -> None:
    async def main() -> list[BaseException]:
        model = engine(**settings)

        async def one() -> None:
            async with model.trace(PROMPT, **LONG) as tracer:
                process = os.getpid().save()
                for step in tracer.iter[:]:
                    hidden = model.resid_post[1].save()

        async with model.trace(PROMPT, **GREEDY):
            model.logits
            process = os.getpid().save()
        assert process != os.getpid()
        tasks = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        with pytest.raises(insitu.EngineError):
            await one()
        model.close()
        return errors

    errors = asyncio.run(main())
    assert {type(error) for error in errors} == {insitu.EngineError}
    assert all("make a new one" in str(error) for error in errors)


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_whoever_asks_the_engine_while_it_ends_is_told(end: str) -> None:
    async def main() -> list[BaseException]:
        model = engine()
        async with model.trace(PROMPT, **GREEDY):
            model.logits
            process = os.getpid().save()

        async def look() -> None:
            while True:
                await model.stats()

        async def install() -> None:
            while True:
                async with model.edit() as (tracer, edit):
                    pass
                await edit.aclear()

        async def trace() -> None:
            while True:
                async with model.trace(PROMPT, **GREEDY):
                    model.logits

        async def long() -> None:
            while True:
                async with model.trace(PROMPT, **LONG) as tracer:
                    for step in tracer.iter[:]:
                        model.resid_post[1].sum()

        async def plain() -> None:
            while True:
                await model.generate(PROMPT, **LONG)

        tasks = [asyncio.create_task(each()) for each in (look, install, trace, long, plain)]
        await asyncio.sleep(0.2)
        if end == "killed":
            os.kill(process, signal.SIGKILL)
        else:
            model.close()
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        model.close()
        return errors

    assert {type(error) for error in asyncio.run(main())} == {insitu.EngineError}


def test_started_inside_a_loop_with_taps(run: Run) -> None:
    async def main() -> Any:
        async with engine(taps=["resid_post[1]"]) as model:
            async with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
                hidden = model.resid_post[1].save()
            stats = await model.stats()
        return hidden, stats

    hidden, stats = asyncio.run(main())
    assert_close(hidden, hf_stream("llama", ids_of("llama")).resid_post[1])
    assert stats.tapped_steps > 0


def test_a_model_whose_loop_has_ended_says_so() -> None:
    model = engine()

    async def trace() -> None:
        async with model.trace(PROMPT, **GREEDY):
            logits = model.logits.save()

    try:
        asyncio.run(trace())
        with pytest.raises(insitu.EngineError, match="the event loop that this engine ran on has ended"):
            asyncio.run(trace())
    finally:
        model.close()


def test_what_waits_for_its_runs_says_so(model: Any, tmp_path: Path) -> None:
    for recipe in (
        lambda: recipes.logit_lens(model, PROMPT),
        lambda: recipes.rows_at(model, [PROMPT], "resid_post[1]"),
        lambda: recipes.Steering(model, torch.ones(models.WIDTH), "resid_post[1]").generate(PROMPT),
    ):
        with pytest.raises(insitu.ArgumentError, match="without mode='async'"):
            recipe()
    with pytest.raises(insitu.ArgumentError, match="got AsyncVLLM"):
        insitu.capture(model, [PROMPT], at="resid_post[1]", out=tmp_path, progress=False)
