"""What blocks beside many requests cost each of two ranks: insitu's own calls, messages between ranks, CPU time.

`python -m benchmarks.ranks [requests] [stages]`: tensor parallel on two cores of a CPU, or two stages of a pipeline.
Calls and messages are counts, and the same on a busy machine; CPU time is that of each rank's thread, in which it also
waits for the other: the median of several runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
os.environ.setdefault("INSITU_CPU_KVCACHE_BYTES", str(2**30))

from rich.console import Console
from rich.table import Table
from vllm import SamplingParams

import insitu
from benchmarks.calls import GREEDY, PROMPT, STEPS, room_of

RUNS = 9
_MESSAGES = {"send", "receive", "gather", "broadcast"}
_LINKS = ("/worker/ranks.py", "/worker/stages.py")


def cases(model: Any, count: int) -> dict[str, Callable[[], object]]:
    llm, prompts, layers = model.vllm_entrypoint, [PROMPT] * count, range(len(model.model.layers))

    def plain(sampling: dict[str, Any]) -> Callable[[], object]:
        given, params = [{"prompt_token_ids": each} for each in prompts], SamplingParams(**sampling)
        return lambda: llm.generate(given, params, use_tqdm=False)

    def one(tracer: Any) -> Any:
        return model.model.layers[1].output[0]

    def every_layer(tracer: Any) -> Any:
        return [model.resid_post[layer][-1] for layer in layers]

    def each_step(tracer: Any) -> Any:
        return [model.resid_post[1][-1] for _ in tracer.iter[:]]

    def last_layer_each_step(tracer: Any) -> Any:
        return [model.resid_post[layers[-1]][-1] for _ in tracer.iter[:]]

    return {
        "plain vLLM": plain(GREEDY),
        "one place saved": lambda: model.run(one, prompts, **GREEDY),
        "last token of every layer": lambda: model.run(every_layer, prompts, **GREEDY),
        "plain vLLM, 16 steps": plain(STEPS),
        "one place at each of 16 steps": lambda: model.run(each_step, prompts, **STEPS),
        "one of the last layer at each": lambda: model.run(last_layer_each_step, prompts, **STEPS),
    }


def start_counting(worker: Any) -> None:
    counted: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "c_call") or not (room := room_of(frame.f_code.co_filename)):
            return
        counted["calls"] += 1
        if event == "call" and frame.f_code.co_name in _MESSAGES and frame.f_code.co_filename.endswith(_LINKS):
            counted["messages"] += 1

    worker.counted = counted
    sys.setprofile(note)


def stop_counting(worker: Any) -> tuple[int, int]:
    sys.setprofile(None)
    return worker.counted["calls"], worker.counted["messages"]


def thread_time(worker: Any) -> float:
    return time.thread_time()


def counts(model: Any, run: Callable[[], object]) -> list[tuple[int, int]]:
    """Calls and messages of each rank."""
    ask = model.vllm_entrypoint.collective_rpc
    ask(start_counting)
    run()
    return ask(stop_counting)


def seconds(model: Any, run: Callable[[], object]) -> list[float]:
    """CPU time of each rank, and of the client."""
    ask = model.vllm_entrypoint.collective_rpc
    before, began = ask(thread_time), time.thread_time()
    run()
    mine = time.thread_time() - began
    return [*(after - each for after, each in zip(ask(thread_time), before, strict=True)), mine]


def main(count: int, lies: str) -> None:
    from tests import models
    from tests.engine.cohorts import run_together

    table = Table("work", "insitu's own calls a request, by rank", "messages", "CPU time of ranks and client, ms")
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 256}
    with insitu.VLLM(models.tiny("llama"), **{lies: 2}, dispatch=True, **settings) as model:
        for name, run in cases(model, count).items():
            ways = (False, True) if "plain" not in name else (False,)
            counted, spent = dict[bool, Any](), {together: list[list[float]]() for together in ways}
            for together in ways:
                run_together(model, together)
                run(), run()  # what places are like is learnt, and much is compiled
                counted[together] = counts(model, run)
            for _ in range(RUNS):
                for together in ways:
                    run_together(model, together)
                    spent[together].append(seconds(model, run))
            for together in ways:
                what = "" if "plain" in name else ", together" if together else ", each alone"
                calls = ", ".join(f"{each / count:.1f}" for each, _ in counted[together])
                times = ", ".join(f"{1e3 * median(each):.1f}" for each in zip(*spent[together], strict=True))
                table.add_row(name + what, calls, str(counted[together][0][1]), times)
        print(model.stats())
    Console(width=140).print(table)


if __name__ == "__main__":
    over_stages = "stages" in sys.argv
    count = next((int(each) for each in sys.argv[1:] if each.isdecimal()), 64)
    main(count, "pipeline_parallel_size" if over_stages else "tensor_parallel_size")
