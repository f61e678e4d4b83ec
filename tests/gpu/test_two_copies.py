"""Two copies of a model, one on each GPU, behind one server: `pytest -m gpu tests/gpu/test_two_copies.py`."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import psutil
import pytest
import torch

import insitu
from tests import models
from tests.engine import served
from tests.engine.helpers import at_once
from tests.engine.served import KEY, Server
from tests.gpu import ranks
from tests.gpu.ranks import VOCABULARY, largest_difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(280, method="thread"),
]

SETTINGS = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "allowed_token_ids": [77]}
BOUND = 0.03
PROMPTS = [
    torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 7, 129, 1)
]
SERVED = (
    "--data-parallel-size", "2", "--trust-code", "--api-key", KEY, "--dtype", "bfloat16", "--no-enforce-eager",
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30), "--max-num-seqs", "320",
)  # fmt: skip
model, nothing_is_left = served.model, served.nothing_is_left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("llama"))
    ranks.save_model("llama", folder)
    models._tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one(folder: str) -> Iterator[Any]:
    """The same model on one GPU, in this process."""
    settings = {"dtype": "bfloat16", "max_model_len": 256, "gpu_memory_utilization": 0.1, "dispatch": True}
    with insitu.VLLM(folder, kv_cache_memory_bytes=2**30, **settings) as model:
        yield model


@pytest.fixture(scope="module")
def server(folder: str, one: Any) -> Iterator[Server]:
    made = Server(*SERVED, folder=folder, environment={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    yield made
    made.close()


def block(model: Any, tracer: Any) -> Any:
    seen = []
    for step in tracer.iter[:]:
        model.resid_post[0] *= 1.5
        seen += [model.resid_post[1], model.q[2], model.logits]
    return seen


@pytest.fixture(scope="module")
def wanted(one: Any) -> list[Any]:
    return one.run(functools.partial(block, one), PROMPTS, **SETTINGS)


def test_traces_of_many_clients_are_those_of_one_gpu(model: Any, wanted: list[Any]) -> None:
    def read(number: int) -> tuple[Any, Any]:
        with model.trace(PROMPTS[number % 4], **SETTINGS) as tracer:
            import os

            process = os.getpid().save()  # type: ignore[attr-defined]
            seen = []
            for step in tracer.iter[:]:
                model.resid_post[0] *= 1.5
                seen += [model.resid_post[1], model.q[2], model.logits]
            seen.save()  # type: ignore[attr-defined]
        return process, seen

    found = at_once(32, read)
    assert len({process for process, _ in found}) == 2
    worst = [largest_difference(seen, wanted[i % 4], "a trace", BOUND) for i, (_, seen) in enumerate(found)]
    print(f"32 clients, two copies against one GPU: {max(worst):.1e}")


def test_many_traced_requests_beside_untraced_ones(server: Server, model: Any, one: Any) -> None:
    generator = random.Random(0)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, 40))] for _ in range(256)]
    settings = {**SETTINGS, "max_tokens": 2}
    wanted = one.run(lambda tracer: [one.resid_post[1][-1] for _ in tracer.iter[:]], prompts, **settings)
    asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def each(number: int) -> Any:
        if number < 64:
            return server.post("/v1/completions", asked)["usage"]["completion_tokens"]
        mine = prompts[(number - 64) * 8 : (number - 63) * 8]
        return model.run(lambda tracer: [model.resid_post[1][-1] for _ in tracer.iter[:]], mine, **settings)

    found = at_once(96, each)
    assert found[:64] == [12] * 64
    print(f"256 beside 64: {largest_difference(list(chain(*found[64:])), wanted, 'beside untraced', BOUND):.1e}")


def test_an_edit_is_on_both_copies_and_for_plain_requests(server: Server, model: Any) -> None:
    asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    plain = server.post("/v1/completions", asked)["choices"][0]["text"]
    with model.edit() as (tracer, edit):
        import os

        process = os.getpid().save()  # type: ignore[attr-defined]
        model.resid_post[1][:] = 0
        zeros = model.resid_post[1].abs().sum().item().save()
    outputs = at_once(16, lambda number: model.generate(PROMPTS[number % 4], **SETTINGS)[0])
    assert {output.saves["zeros"] for output in outputs} == {0.0}
    assert len({output.saves["process"] for output in outputs}) == 2
    texts = set(at_once(8, lambda number: server.post("/v1/completions", asked)["choices"][0]["text"]))
    assert plain not in texts
    edit.clear()
    assert plain in at_once(8, lambda number: server.post("/v1/completions", asked)["choices"][0]["text"])


def test_each_copy_is_as_a_check_wants_it(model: Any) -> None:
    report = model.check([PROMPTS[0]], reference=False, show=False)
    assert {row.place.rpartition(" (")[2] for row in report.rows} == {"copy 0)", "copy 1)"}
    assert report.passed, report.failed


def test_a_killed_copy_is_an_error_for_all_who_wait(server: Server) -> None:
    """The last test of this file: the server ends."""
    long = {**SETTINGS, "max_tokens": 200}
    client = insitu.connect(server.url, KEY)
    cores = [each for each in psutil.Process(server.process.pid).children() if "EngineCore" in " ".join(each.cmdline())]
    assert len(cores) == 2

    def trace(number: int) -> BaseException | None:
        try:
            while True:
                client.run(lambda tracer: [client.resid_post[1].sum() for _ in tracer.iter[:]], PROMPTS[0], **long)
        except insitu.EngineError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(trace, number) for number in range(8)]
        while client.in_flight() < 8:
            pass
        cores[1].kill()
        errors = [each.result(60) for each in asked]
    assert all("make a new one" in str(error) for error in errors)
