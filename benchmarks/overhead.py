"""Microseconds that tracing adds to a request, and each place to that. `python -m benchmarks.overhead`

On a tiny random model, where the engine's own work is small; plain vLLM in the same run, by turns.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rich.console import Console
from rich.table import Table

import insitu
from benchmarks.calls import cases
from tests import models

CASES = ("plain vLLM", "one place, invokes", "four places")
ROUNDS = 15
ALONE = 300
"""Rounds of one request by itself, which is over soon."""


def main() -> None:
    folder = models.tiny("llama")
    table = Table("requests together", "plain, µs a request", "tracing adds", "each further place adds")
    with insitu.VLLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=256) as model:
        model.dispatch()
        runs = cases(model)
        for count in (1, 16, 256):
            seconds: dict[str, list[float]] = {name: [] for name in CASES}
            for turn in range(max(ROUNDS, ALONE // count) + 1):
                for name, taken in seconds.items():
                    start = time.perf_counter()
                    runs[name](count)
                    if turn:
                        taken.append(time.perf_counter() - start)
            plain, one, four = (statistics.median(values) / count * 1e6 for values in seconds.values())
            table.add_row(str(count), f"{plain:.0f}", f"{one - plain:.0f} µs", f"{(four - one) / 3:.1f} µs")
    Console().print(table)


if __name__ == "__main__":
    main()
