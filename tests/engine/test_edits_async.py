"""Edits beside many requests of an async engine at once, while others look at it and leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import insitu
from tests import models
from tests.engine.edits import PROMPT_IDS

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

REQUESTS = 300


async def _many(model: Any) -> tuple[list[Any], int]:
    from vllm import SamplingParams

    async with model.edit() as (tracer, _):
        rows = model.resid_post[1].shape[0]
        rows.save()
        if rows == 9:
            raise ValueError("nine")

    async def one(i: int) -> Any:
        ids, last = [*PROMPT_IDS, *range(5, 10)][: 9 if i % 50 == 7 else 4], None
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        outputs = model.vllm_entrypoint.generate({"prompt_token_ids": ids}, params, str(i))
        async for output in outputs:
            last = output
            if i % 50 == 9:
                await outputs.aclose()
                return None
            await asyncio.sleep(0.001 * (i % 7))  # its last output waits for it
        return last

    async def look(done: asyncio.Event) -> None:
        while not done.is_set():
            await model.in_flight()

    done = asyncio.Event()
    looking = asyncio.create_task(look(done))
    found = await asyncio.gather(*(one(i) for i in range(REQUESTS)))
    done.set()
    await looking
    await model.aclear_edits()
    return found, await model.in_flight()


def test_every_request_has_its_saves_whoever_looks_meanwhile() -> None:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 64}
    with insitu.VLLM(models.tiny("llama"), mode="async", dispatch=True, **settings) as model:
        found, left = asyncio.run(asyncio.wait_for(_many(model), 200))
    assert left == 0
    for i, output in enumerate(found):
        if i % 50 == 9:
            assert output is None
        else:
            assert output.saves == {"rows": 9 if i % 50 == 7 else 4}, i
            assert (output.error is None) is (i % 50 != 7)
