"""Many traces, some of which fail and some of which are left early: what the engine still holds afterwards."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("INSITU_CPU_KVCACHE_BYTES", str(2**30))

import psutil

import insitu
from benchmarks.serving import OURS, PROMPT, Held, Server, by_part, held, left_over

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
_LONG = {"max_tokens": 150, "ignore_eos": True}
_LEFT_AFTER = 0.05
_WINDOWS = 10
_WARM_UP = 100

Told = Callable[[int, Mapping[str, Held]], None]
"""Is called with what each process holds after so many traces; the last time when the clients have gone."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--model", default=None, help="a folder (default: SmolLM2)")
    parser.add_argument("--traces", type=int, default=10_000, help="1%% of them fail, 1%% are left (default: 10000)")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--by", choices=("server", "async"), default="server")
    chosen = parser.parse_args()
    folder = chosen.model or insitu.demo_model()
    seen: list[Mapping[str, Held]] = []

    def told(done: int, parts: Mapping[str, Held]) -> None:
        seen.append(parts)
        for part, one in parts.items():
            counts = ", ".join(f"{name} {count}" for name, count in one._asdict().items() if name != "resident")
            print(f"{done} traces, {part}: {one.resident:.0f} MiB, {counts}", flush=True)

    ended, in_flight = LOADS[chosen.by](folder, chosen.traces, chosen.at_once, told)
    left = left_over(seen[0], seen[-1])
    print(f"{dict(sorted(ended.items()))}; in_flight afterwards: {in_flight}; left: {'; '.join(left) or 'nothing'}")
    if in_flight or left:
        raise SystemExit(1)


def ending(number: int) -> str:
    """What becomes of a trace: ``fails``, ``left`` or ``ends``."""
    return {7: "fails", 57: "left"}.get(number % 100, "ends")


def at_a_server(folder: str, traces: int, at_once: int, told: Told) -> tuple[Counter[str], int]:
    """Traces of clients in this process at a server. How many ended in which way, and what is in flight after them."""
    server = Server(OURS, folder)
    try:
        model, ended = insitu.connect(server.url), Counter[str]()
        leaving = insitu.connect(server.url, timeout=_LEFT_AFTER)

        def one(number: int) -> str:
            how = ending(number)
            try:
                if how == "left":
                    leaving.run(each_step(leaving), f"{number}: {PROMPT}", **_LONG)
                else:
                    model.run(one_value(model, how), f"{number}: {PROMPT}", max_tokens=2)
            except ZeroDivisionError:
                return "fails"
            except insitu.EngineError as error:
                if "timed out" not in str(error):
                    raise
                return "left"
            return "ends"

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, range(_WARM_UP)))
            told(0, server.held_without_clients())
            for first, last in windows(traces):
                ended.update(pool.map(one, range(first, last)))
                told(last, server.held())
        in_flight = settled(model.in_flight)
        told(traces, server.held_without_clients())
        return ended, in_flight
    finally:
        server.close()


def by_an_async_engine(folder: str, traces: int, at_once: int, told: Told) -> tuple[Counter[str], int]:
    """The same by an async model in this process; those that are left are cancelled."""
    model = insitu.VLLM(folder, mode="async", **ENGINE)
    here = psutil.Process()

    async def one(number: int, places: asyncio.Semaphore) -> str:
        how = ending(number)
        async with places:
            try:
                if how == "left":
                    work = model.run(each_step(model), f"{number}: {PROMPT}", **_LONG)
                    await asyncio.wait_for(work, _LEFT_AFTER)
                else:
                    await model.run(one_value(model, how), f"{number}: {PROMPT}", max_tokens=2)
            except ZeroDivisionError:
                return "fails"
            except TimeoutError:
                return "left"
            return "ends"

    async def all_of_them() -> tuple[Counter[str], int]:
        async with model:
            places = asyncio.Semaphore(at_once)

            async def each(first: int, last: int) -> list[str]:
                return await asyncio.gather(*(one(number, places) for number in range(first, last)))

            def tell(done: int) -> None:
                told(done, {part: held(process) for part, process in by_part(here).items()})

            await each(0, _WARM_UP)
            tell(await model.in_flight())
            ended = Counter[str]()
            for first, last in windows(traces):
                ended.update(await each(first, last))
                tell(last)
            in_flight = await model.in_flight()
            tell(traces)
            return ended, in_flight

    return asyncio.run(all_of_them())


LOADS = {"server": at_a_server, "async": by_an_async_engine}


def one_value(model: Any, how: str) -> Callable[[Any], Any]:
    if how == "fails":
        return lambda tracer: model.resid_post[2] * (1 / 0)
    return lambda tracer: model.resid_post[2][-1]


def each_step(model: Any) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        hidden = None
        for _ in tracer.iter[:]:
            hidden = model.resid_post[1]
        return hidden

    return block


def windows(traces: int) -> list[tuple[int, int]]:
    edges = [traces * number // _WINDOWS for number in range(_WINDOWS + 1)]
    return list(pairwise(edges))


def settled(in_flight: Callable[[], int]) -> int:
    """What is in flight, once the server has noticed that the last clients are gone."""
    held = in_flight()
    for _ in range(100):
        if not held:
            break
        time.sleep(0.1)
        held = in_flight()
    return held


if __name__ == "__main__":
    main()
