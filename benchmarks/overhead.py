"""Microseconds that tracing adds to a request, and each place to that. `python -m benchmarks.overhead`

On a tiny random model, where the engine's own work is small; plain vLLM in the same run, by turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rich.console import Console
from rich.table import Table
from vllm import SamplingParams

import insitu
from tests import models

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
GREEDY = {"temperature": 0.0, "max_tokens": 1}
ROUNDS = 15


def cases(model: Any) -> dict[str, Callable[[int], object]]:
    llm, layers = model.vllm_entrypoint, model.model.layers

    def plain(count: int) -> None:
        prompts = [{"prompt_token_ids": PROMPT} for _ in range(count)]
        llm.generate(prompts, SamplingParams(**GREEDY, skip_reading_prefix_cache=True), use_tqdm=False)

    def one(count: int) -> None:
        with model.trace(**GREEDY) as tracer:
            for _ in range(count):
                with tracer.invoke(PROMPT):
                    a = layers[1].output[0].save()

    def four(count: int) -> None:
        with model.trace(**GREEDY) as tracer:
            for _ in range(count):
                with tracer.invoke(PROMPT):
                    a = layers[0].output[0].save()
                    b = layers[1].output[0].save()
                    c = layers[2].output[0].save()
                    d = layers[3].output[0].save()

    return {"plain": plain, "one": one, "four": four}


def main() -> None:
    folder = models.tiny("llama")
    table = Table("requests together", "plain, µs a request", "tracing adds", "each further place adds")
    with insitu.VLLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=256) as model:
        model.dispatch()
        for count in (1, 16, 256):
            seconds = {name: [] for name in cases(model)}
            for turn in range(ROUNDS + 1):
                for name, run in cases(model).items():
                    start = time.perf_counter()
                    run(count)
                    if turn:
                        seconds[name].append(time.perf_counter() - start)
            plain, one, four = (statistics.median(values) / count * 1e6 for values in seconds.values())
            table.add_row(str(count), f"{plain:.0f}", f"{one - plain:.0f} µs", f"{(four - one) / 3:.1f} µs")
    Console().print(table)


if __name__ == "__main__":
    main()
