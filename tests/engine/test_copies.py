"""Two copies of a model behind one front of vLLM's (data parallel): a server with many clients, and an async engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

import insitu
from tests import models
from tests.engine import served
from tests.engine.helpers import PROMPT, Run, assert_close, at_once, hf_edited, hf_stream, ids_of, last_logits
from tests.engine.served import KEY, Server

pytestmark = [pytest.mark.slow, pytest.mark.in_process, pytest.mark.timeout(900)]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
PROMPTS = [PROMPT, "Water boils at one hundred degrees", "She opened the door", "When Mary and John went"]
CORES = "0|1"
model, nothing_is_left = served.model, served.nothing_is_left


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    several = ("--data-parallel-size", "2", "--trust-code", "--api-key", KEY)
    made = Server(*several, environment={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": CORES})
    yield made
    made.close()


def test_traces_of_many_clients_run_on_both_copies_and_equal_transformers(model: Any) -> None:
    def one(number: int) -> tuple[int, list[torch.Tensor], torch.Tensor]:
        seen: list[torch.Tensor] = []
        with model.trace(PROMPTS[number % 4], temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            import os

            process = os.getpid().save()  # type: ignore[attr-defined]
            for step in tracer.iter[:]:
                if step == 0:
                    hidden = model.resid_post[2].save()
                seen.append(model.logits)
            seen.save()  # type: ignore[attr-defined]
        return process, seen, hidden

    found = at_once(16, one)
    assert len({process for process, *_ in found}) == 2
    for number, (_, seen, hidden) in enumerate(found):
        ids = ids_of("llama", PROMPTS[number % 4])
        assert_close(hidden, hf_stream("llama", ids).resid_post[2])
        for logits in seen:
            assert_close(logits, hf_stream("llama", ids).logits[-1:])
            ids = [*ids, int(logits.argmax())]
        assert len(seen) == 4


def test_an_edit_is_on_both_copies_and_for_plain_requests_of_every_route(server: Server, model: Any) -> None:
    def zeroed(output: torch.Tensor) -> torch.Tensor:
        return output * 0

    asked = {"model": "tiny", "prompt": ids_of("llama"), "max_tokens": 8, "temperature": 0}
    plain = server.post("/v1/completions", asked)["choices"][0]["text"]
    with model.edit() as (tracer, edit):
        import os

        process = os.getpid().save()  # type: ignore[attr-defined]
        model.model.layers[1].mlp.output[:] = 0
        logits = model.logits.save()
    outputs = at_once(12, lambda number: model.generate(PROMPT, **GREEDY)[0])
    wanted = last_logits(hf_edited("llama", ids_of("llama"), {"model.layers.1.mlp": zeroed}))
    for output in outputs:
        assert_close(output.saves["logits"], wanted)
    assert len({output.saves["process"] for output in outputs}) == 2
    texts = at_once(6, lambda number: server.post("/v1/completions", asked)["choices"][0]["text"])
    assert len(set(texts)) == 1
    assert texts[0] != plain
    edit.clear()
    assert at_once(6, lambda number: server.post("/v1/completions", asked)["choices"][0]["text"]) == [plain] * 6


def test_what_an_edit_leaves_beside_each_sequence_of_a_request_comes_home(model: Any) -> None:
    with model.edit():
        drawn = model.samples.item().save()

    def one(number: int) -> Any:
        return model.generate(PROMPT, n=4, temperature=1.0, max_tokens=1, ignore_eos=True)[0]

    for output in at_once(4, one):
        assert [each.saves["drawn"] for each in output.outputs] == [each.token_ids[0] for each in output.outputs]


def test_a_form_beside_openai_s_requests_is_where_they_are(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    form = {"actions": [{"do": "read", "at": "resid_post[2]", "as": "hidden", "positions": "all"}]}

    def one(number: int) -> Any:
        headers = {"X-data-parallel-rank": str(number % 2)}
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, extra_body={"insitu": form}, extra_headers=headers, **GREEDY
        )
        return answer.choices[0].insitu["saves"]["hidden"]  # type: ignore[attr-defined]

    for found in at_once(8, one):
        assert_close(torch.tensor(found), hf_stream("llama", ids_of("llama")).resid_post[2])


def test_counts_are_of_both_copies(server: Server, model: Any) -> None:
    before = model.stats()
    at_once(8, lambda number: model.run(lambda tracer: model.resid_post[2], PROMPT, **GREEDY))
    after = model.stats()
    beside = sum(after[name] - before[name] for name in ("blocks_together", "blocks_alone"))
    assert beside == 8
    assert after["eager_steps"] - before["eager_steps"] >= 2


def test_an_error_in_a_block_is_its_own_and_untraced_requests_go_on(server: Server, model: Any) -> None:
    asked = {"model": "tiny", "prompt": ids_of("llama"), "max_tokens": 8, "temperature": 0}
    plain = server.post("/v1/completions", asked)["choices"][0]["text"]

    def fails(tracer: Any) -> None:
        model.resid_post[1]
        raise KeyError("mine")

    def one(number: int) -> str:
        if number % 3 == 0:
            with pytest.raises(KeyError, match="mine"):
                model.run(fails, PROMPT, **GREEDY)
        elif number % 3 == 1:
            assert_close(
                model.run(lambda tracer: model.resid_post[1], PROMPT, **GREEDY),
                hf_stream("llama", ids_of("llama")).resid_post[1],
            )
        return server.post("/v1/completions", asked)["choices"][0]["text"]

    assert set(at_once(12, one)) == {plain}


def test_a_check_is_of_each_copy(model: Any) -> None:
    report = model.check(["Water boils at"], reference=False, show=False)
    assert report.passed
    copies = [
        {row.place.removesuffix(f" (copy {copy})") for row in report.rows if f"(copy {copy})" in row.place}
        for copy in range(2)
    ]
    assert copies[0] == copies[1] != set()
    assert len(report.rows) == sum(f"(copy {copy})" in row.place for row in report.rows for copy in range(2))


def test_an_async_engine_s_traces_share_and_are_left_and_a_killed_copy_is_an_error_for_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", CORES)
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "data_parallel_size": 2}
    model: Any = insitu.VLLM(models.tiny("llama"), mode="async", dispatch=True, **settings)
    processes: set[int] = set()

    async def one() -> None:
        with model.trace(PROMPT, **LONG) as tracer:
            process = os.getpid().save()  # type: ignore[attr-defined]
            for step in tracer.iter[:]:
                hidden = model.resid_post[1].save()
        async for output in tracer.backend:
            if len(output.outputs[0].token_ids) > 3:
                break

    async def located() -> None:
        async with model.trace(PROMPT, **GREEDY):
            model.resid_post[1]
            process = os.getpid().save()  # type: ignore[attr-defined]
        processes.add(process)

    async def shared() -> list[torch.Tensor]:
        """The invokes of one trace change one list, wherever they run."""
        async with model.trace(**GREEDY) as tracer:
            rows = [].save()  # type: ignore[attr-defined,var-annotated]
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    rows.append(model.resid_post[1][-1])
        return rows

    async def traced_again_and_again() -> None:
        while True:
            async with model.trace(PROMPT, **LONG) as tracer:
                for step in tracer.iter[:]:
                    model.resid_post[1]

    async def plain_again_and_again() -> None:
        while True:
            await model.generate(PROMPT, **LONG)

    async def main() -> list[Any]:
        await asyncio.gather(*(one() for _ in range(6)))
        assert await model.in_flight() == 0
        await asyncio.gather(*(located() for _ in range(6)))
        assert len(processes) == 2
        for rows in await asyncio.gather(*(shared() for _ in range(4))):
            wanted = [hf_stream("llama", ids_of("llama", prompt)).resid_post[1][-1] for prompt in PROMPTS]
            assert len(rows) == 4
            assert all(min((row - each).abs().max().item() for row in rows) < 1e-4 for each in wanted)
        kinds = (traced_again_and_again, plain_again_and_again)
        tasks = [asyncio.create_task(kind()) for kind in kinds for _ in range(4)]
        await asyncio.sleep(0.1)
        os.kill(processes.pop(), signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        with pytest.raises(insitu.EngineError):
            await located()
        return errors

    try:
        errors = run(main())
    finally:
        model.close()
    assert {type(error) for error in errors} == {insitu.EngineError}
    assert all("make a new one" in str(error) for error in errors)
