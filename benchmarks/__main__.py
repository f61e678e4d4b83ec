"""What insitu costs beside plain vLLM, on this machine. Run by `make bench`."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from rich.console import Console
from rich.table import Table
from vllm import LLM, SamplingParams

import insitu

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 64}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="requests at a time (default: 16)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that each generates (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="of each case; the median counts (default: 5)")
    chosen = parser.parse_args()

    # Each prompt is new in each round: no case lives on the prefix cache that another has filled.
    folder = insitu.demo_model()
    plain, model = LLM(folder, **ENGINE), insitu.VLLM(folder, dispatch=True, **ENGINE)
    sampling = {"temperature": 0.0, "max_tokens": chosen.tokens, "ignore_eos": True}
    params = SamplingParams(**sampling)

    def one(tracer: insitu.engine.client.trace.Trace) -> object:
        return model.model.layers[15].output[0][-1]

    def every(tracer: insitu.engine.client.trace.Trace) -> object:
        return [layer.output[0][-1] for layer in model.model.layers]

    cases: dict[str, Callable[[list[str]], object]] = {
        "plain vLLM": lambda prompts: plain.generate(prompts, params, use_tqdm=False),
        "insitu, not traced": lambda prompts: model.vllm_entrypoint.generate(prompts, params, use_tqdm=False),
        "insitu, one layer of the prompt read": lambda prompts: model.run(one, prompts, **sampling),
        "insitu, every layer of the prompt read": lambda prompts: model.run(every, prompts, **sampling),
    }
    times = measure(cases, chosen.prompts, chosen.rounds)
    show(times, tokens=chosen.prompts * chosen.tokens)
    model.close()


def measure(cases: dict[str, Callable[[list[str]], object]], prompts: int, rounds: int) -> dict[str, float]:
    """Seconds of each case: the median of `rounds`, the cases by turns, the first round not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for case, (name, run) in enumerate(cases.items()):
            batch = [f"{turn} {case} {number}: once upon a time there was" for number in range(prompts)]
            start = time.perf_counter()
            run(batch)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(times: dict[str, float], tokens: int) -> None:
    baseline = next(iter(times.values()))
    table = Table("case", "seconds", "tokens/s", "of plain vLLM")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds:.2f}", f"{tokens / seconds:.0f}", f"{baseline / seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
