"""A trace over HTTP beside the same trace at the same engine, and how fast saved values come over.

The engine and its routes run in this process; the client is another one. `--prompts 64 256` takes traces of so many
prompts instead, each with its restricted block run alone and with one run for all: time, and calls in the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from rich.console import Console
from rich.table import Table

import insitu
from benchmarks.load import ENGINE
from benchmarks.serving import PROMPT
from insitu.engine.server.access import Access
from insitu.engine.server.routes import router
from insitu.engine.server.traces import Traces
from insitu.net import Keys
from tests import models
from tests.engine.cohorts import may_be_together

_CHUNK = 1 << 20
_ROUNDS, _EACH, _TRACES = 20, 5, 5
_PROMPT = list(range(5, 13))
_GREEDY = {"temperature": 0.0, "max_tokens": 1}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--model", default=None, help="a folder (default: SmolLM2)")
    parser.add_argument("--mib", type=int, default=200, help="how much is saved at once (default: 200)")
    parser.add_argument("--prompts", type=int, nargs="+", metavar="N", help="traces of so many prompts instead")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.client:
        client(chosen.client)
    elif chosen.prompts:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the worker
        asyncio.run(compare_many(chosen.model or models.tiny("llama"), chosen.prompts))
    else:
        asyncio.run(compare(chosen.model or insitu.demo_model(), chosen.mib))


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Callable[[str, int], Awaitable[list[float]]]]:
    """A client in another process, to be asked how long what it does takes."""
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.remote", "--client", url, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    async def asked(what: str, number: int) -> list[float]:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(f"{what} {number}\n".encode())
        return json.loads(await other.stdout.readline())

    try:
        yield asked
    finally:
        other.terminate()
        await other.wait()


async def compare(folder: str, mib: int) -> None:
    async with (
        insitu.VLLM(folder, mode="async", **ENGINE) as model,
        served(model) as url,
        client_of(url) as asked,
    ):
        here: list[float] = []
        there: list[float] = []
        for turn in range(_ROUNDS + 1):
            far = await asked("trace", _EACH)
            near = [await timed(model) for _ in range(_EACH)]
            if turn:
                here += near
                there += far
        near, far = (1000 * statistics.median(each) for each in (here, there))
        print(f"one trace of one value: here {near:.1f} ms, over HTTP {far:.1f} ms: {far - near:+.1f} ms")
        saved, plain = await asked("save", mib), await asked("stream", mib)
        print(f"{mib} MiB saved: {mib / min(saved):.0f} MiB/s; as a plain stream {mib / min(plain):.0f} MiB/s")


async def compare_many(folder: str, counts: list[int]) -> None:
    table = Table("prompts", "block", "its runs", "s a trace", "block's ms a request", "worker's calls a request")
    settings = {**ENGINE, "max_num_seqs": max(counts), "max_num_batched_tokens": 16384}
    async with (
        insitu.VLLM(folder, mode="async", **settings) as model,
        served(model) as url,
        client_of(url) as asked,
    ):
        call = model._running().llm.collective_rpc  # type: ignore[union-attr]
        for count in counts:
            for what in ("read", "steered"):
                for together in (False, True):
                    await call(may_be_together, args=(together,))
                    await asked(what, count)
                    before = await model.stats()
                    took = [(await asked(what, count))[0] for _ in range(_TRACES)]
                    after = await model.stats()
                    seconds = (after.block_seconds - before.block_seconds) / _TRACES
                    await call(count_calls, args=(True,))
                    await asked(what, count)
                    (calls,) = await call(count_calls, args=(False,))
                    runs = f"{(after.blocks_together - before.blocks_together) / _TRACES:.0f} together"
                    each = f"{1000 * seconds / count:.2f}", f"{calls / count:.0f}"
                    table.add_row(str(count), what, runs, f"{statistics.median(took):.2f}", *each)
    Console().print(table)


def count_calls(worker: Any, begin: bool) -> int:
    """Calls of Python's and C's functions in the worker's thread, since it was called to begin."""
    counted = vars(worker).setdefault("benchmark_calls", [0])

    def note(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            counted[0] += 1

    sys.setprofile(note if begin else None)
    found, counted[0] = counted[0], 0
    return found


async def timed(model: Any) -> float:
    start = time.perf_counter()
    async with model.trace(PROMPT, **_GREEDY):
        hidden = model.resid_post[2].save()
    assert hidden.dim() == 2
    return time.perf_counter() - start


@asynccontextmanager
async def served(model: Any) -> AsyncIterator[str]:
    """The routes of a server around a model of this process. Gives its address."""
    await model
    await model.in_flight()
    app = FastAPI()
    app.include_router(router(model, Traces(model), Access(Keys([]))))

    @app.get("/plain/{mib}")
    async def plain(mib: int) -> StreamingResponse:
        part = bytes(_CHUNK)

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(mib):
                yield part

        return StreamingResponse(parts())

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


def client(url: str) -> None:
    model = insitu.connect(url)

    def trace(_: int) -> None:
        with model.trace(PROMPT, **_GREEDY):
            hidden = model.resid_post[2].save()
        assert hidden.ndim == 2

    def save(mib: int) -> None:
        with model.trace(PROMPT, **_GREEDY):
            first = model.resid_post[2][0, 0]
            large = (first * 0).expand(mib << 18).contiguous().save()
        assert large.shape == (mib << 18,)

    def stream(mib: int) -> None:
        with urllib.request.urlopen(f"{url}/plain/{mib}") as answer:
            while answer.read1(_CHUNK):
                pass

    def read(count: int) -> None:
        with model.trace(**_GREEDY) as tracer:
            for _ in range(count):
                with tracer.invoke(_PROMPT):
                    rows = [model.resid_post[layer][-1] for layer in range(4)].save()
        assert len(rows) == count

    def steered(count: int) -> None:
        with model.trace(temperature=0.0, max_tokens=16, ignore_eos=True) as tracer:
            for number in range(count):
                vector = torch.full((128,), number / count)
                with tracer.invoke(_PROMPT):
                    last = [].save()
                    for _ in tracer.iter[:]:
                        model.resid_post[1][:] += vector
                        last.append(model.logits[0].argmax(-1))
        assert len(last) == count

    works: dict[str, tuple[Callable[[int], None], int]] = {
        "trace": (trace, 0),
        "save": (save, 3),
        "stream": (stream, 3),
        "read": (read, 1),
        "steered": (steered, 1),
    }
    for line in sys.stdin:
        what, number = line.split()
        work, times = works[what]
        took: list[float] = []
        for _ in range(times or int(number)):
            start = time.perf_counter()
            work(int(number))
            took.append(time.perf_counter() - start)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
