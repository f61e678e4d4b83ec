"""Edits of an async engine whose installation, or whose requests, are broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import insitu
from insitu.block import ArgumentError, EngineError
from tests import models
from tests.engine.edits import PROMPT_IDS
from tests.engine.helpers import Run

pytestmark = [pytest.mark.slow, pytest.mark.in_process]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    with insitu.VLLM(models.tiny("llama"), mode="async", dispatch=True, **settings) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(model: Any, run: Run) -> Iterator[None]:
    yield
    run(model.aclear_edits())
    assert run(model.in_flight()) == 0
    assert model._engine.installed.outstanding == 0


async def watch(model: Any, name: str | None = None) -> Any:
    async with model.edit(name) as (tracer, edit):
        lengths = [].save()
        for _ in tracer.all():
            lengths.append(model.resid_post[1].shape[0])
    return edit


def outputs_of(model: Any, name: str, tokens: int) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return model.vllm_entrypoint.generate({"prompt_token_ids": PROMPT_IDS}, params, name)


async def held(model: Any) -> int:
    """Requests of which the worker holds anything, without tidying up first."""
    return await model._engine._channel.call("insitu_in_flight")


async def soon(true: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    for _ in range(100):
        if await true():
            return True
        await asyncio.sleep(0.05)
    return False


def test_of_two_installed_at_once_under_one_name_one_is_refused(model: Any, run: Run) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(watch(model, "same") for _ in range(3)), return_exceptions=True)

    edit, *refused = run(main())
    assert model.edits() == [edit]
    assert [type(error) for error in refused] == [ArgumentError] * 2
    assert all("there is an edit `same` already" in str(error) for error in refused)


def test_those_installed_at_once_run_in_the_order_of_their_numbers(model: Any, run: Run) -> None:
    async def main() -> None:
        await asyncio.gather(*(watch(model) for _ in range(5)))

    run(main())
    numbers = [edit.number for edit in model.edits()]
    assert numbers == sorted(numbers)
    assert len(numbers) == 5


@pytest.mark.parametrize("turns", range(5))
def test_an_installation_that_is_cancelled_has_not_happened(model: Any, run: Run, turns: int) -> None:
    async def main() -> Any:
        task = asyncio.create_task(watch(model, "cancelled"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        (left,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(left, asyncio.CancelledError)
        assert model.edits() == []
        edit = await watch(model, "cancelled")
        return [output async for output in outputs_of(model, "after", 2)][-1], edit

    output, edit = run(main())
    assert output.error is None
    assert output.saves == {"lengths": [len(PROMPT_IDS), 1]}
    assert model.edits() == [edit]


def test_requests_that_are_aborted_are_let_go_of_without_being_asked_for(model: Any, run: Run) -> None:
    async def leave(name: str) -> None:
        outputs = outputs_of(model, name, 200)
        async for _ in outputs:
            await outputs.aclose()

    async def main() -> bool:
        await watch(model)
        await asyncio.gather(*(leave(str(number)) for number in range(6)))

        async def none() -> bool:
            return await held(model) == 0

        return await soon(none)

    assert run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
def test_whoever_is_cancelled_while_saves_come_home_leaves_nothing(model: Any, run: Run, turns: int) -> None:
    async def read(asked: asyncio.Event) -> None:
        collect = model._engine.collect

        def noted(*args: Any) -> Any:
            asked.set()
            return collect(*args)

        model._engine.collect = noted
        try:
            async for _ in outputs_of(model, "cancelled", 1):
                pass
        finally:
            model._engine.collect = collect

    async def main() -> bool:
        edit = await watch(model)
        asked = asyncio.Event()
        task = asyncio.create_task(read(asked))
        await asked.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await edit.aclear()
        await model.in_flight()
        return model._engine.installed.outstanding == 0

    assert run(main())


def test_to_clear_edits_from_another_thread_is_refused_and_leaves_them(model: Any, run: Run) -> None:
    async def main() -> list[Any]:
        edit = await watch(model)
        calls = [edit.aclear, model.aclear_edits, lambda: watch(model)]
        elsewhere = [asyncio.to_thread(lambda call=call: asyncio.run(call())) for call in calls]
        return [edit, *await asyncio.gather(*elsewhere, return_exceptions=True)]

    edit, *refused = run(main())
    assert [type(error) for error in refused] == [EngineError] * 3
    assert model.edits() == [edit]
    run(edit.aclear())
    assert model.edits() == []


def test_a_with_that_does_not_wait_is_refused_with_the_one_that_does(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"`async with model\.edit"):
        with model.edit() as (_, _edit):
            pass
    assert model.edits() == []
