"""Microseconds that tracing adds to a request, and each place to that. `python -m benchmarks.overhead`

On a tiny random model, where the engine's own work is small; plain vLLM in the same run, by turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rich.console import Console
from rich.table import Table

import insitu
from benchmarks.calls import cases
from tests import models

WORKS = ((1, "one place, a trace each"), *((count, "one place, invokes") for count in (1, 16, 256)))
ROUNDS = 15
ALONE = 300
"""Rounds of one request by itself, which is over soon."""


def main() -> None:
    folder = models.tiny("llama")
    table = Table("requests together", "plain, µs a request", "one place adds", "each further place adds")
    with insitu.VLLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=256) as model:
        model.dispatch()
        runs = cases(model)
        for count, work in WORKS:
            further = ("four places",) if "invokes" in work else ()
            seconds: dict[str, list[float]] = {name: [] for name in ("plain vLLM", work, *further)}
            for turn in range(max(ROUNDS, ALONE // count) + 1):
                for name, taken in seconds.items():
                    start = time.perf_counter()
                    runs[name](count)
                    if turn:
                        taken.append((time.perf_counter() - start) / count * 1e6)
            plain, one, *four = seconds.values()
            adds = (added(one, plain), *(added(each, one, places=3) for each in four))
            table.add_row(f"{count}, {work}", f"{statistics.median(plain):.0f}", *adds)
    Console().print(table)


def added(after: Sequence[float], before: Sequence[float], places: int = 1) -> str:
    """The middle of what neighbouring rounds differ by, and its quartiles: a machine's speed drifts."""
    low, middle, high = statistics.quantiles([(b - a) / places for a, b in zip(before, after, strict=True)], n=4)
    return f"{middle:.0f} µs ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
