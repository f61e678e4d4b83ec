"""How many calls of Python's and of C's functions a traced request makes, beside plain vLLM.

`python -m benchmarks.calls`, and `python -m benchmarks.calls taps` for an engine with a tap that works as in a graph:
each step's work there, of blocks run together and each alone. Counts are the same on a busy machine as on a quiet
one, so that a regression shows which no clock would.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("INSITU_CPU_KVCACHE_BYTES", str(2**30))

import torch
from rich.console import Console
from rich.table import Table
from vllm import SamplingParams

import insitu

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
GREEDY = {"temperature": 0.0, "max_tokens": 1}
STEPS = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
COUNTS = (16, 256, 1024)
_SOURCE = str(Path(insitu.__file__).parent) + os.sep


def cases(model: Any) -> dict[str, Callable[[int], object]]:
    """What is counted, each a function of the number of requests."""
    llm, layers = model.vllm_entrypoint, model.model.layers

    def plain(count: int) -> None:
        prompts = [{"prompt_token_ids": PROMPT} for _ in range(count)]
        llm.generate(prompts, SamplingParams(**GREEDY, skip_reading_prefix_cache=True), use_tqdm=False)

    def function(count: int) -> None:
        model.run(lambda tracer: layers[1].output[0], [PROMPT] * count, **GREEDY)

    def traces(count: int) -> None:
        for _ in range(count):
            with model.trace(PROMPT, **GREEDY):
                a = layers[1].output[0].save()

    def invokes(count: int) -> None:
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

    def plain_steps(count: int) -> None:
        prompts = [{"prompt_token_ids": PROMPT} for _ in range(count)]
        llm.generate(prompts, SamplingParams(**STEPS, skip_reading_prefix_cache=True), use_tqdm=False)

    def steered(count: int) -> None:
        with model.trace(**STEPS) as tracer:
            for vector in torch.ones(count, 128):
                with tracer.invoke(PROMPT):
                    for _ in tracer.iter[:]:
                        model.resid_post[1][:] += vector

    def read(count: int) -> None:
        model.run(lambda tracer: [model.resid_post[1][-1] for _ in tracer.iter[:]], [PROMPT] * count, **STEPS)

    steps = {"plain vLLM, 16 steps": plain_steps, "steered, 16 steps": steered, "read, 16 steps": read}
    return steps | {
        "plain vLLM": plain,
        "one place, function": function,
        "one place, a trace each": traces,
        "one place, invokes": invokes,
        "four places": four,
    }


def profiled(run: Callable[[], object], note: Callable[[FrameType, str, Any], object]) -> None:
    """Runs it while ``note`` is told of each call, as by ``sys.setprofile``."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)


@cache
def room_of(file: str) -> str:
    """Of insitu's; "" for all other files."""
    parts = file.removeprefix(_SOURCE).split(os.sep)
    return "/".join(parts[:-1]) if file.startswith(_SOURCE) else ""


def calls_of(run: Callable[[], object]) -> Counter[str]:
    """Calls while ``run`` runs, by room of insitu, and of everything else by ``""``."""
    counted: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            counted[room_of(frame.f_code.co_filename)] += 1

    profiled(run, note)
    return counted


def measured(model: Any, count: int) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for name, run in cases(model).items():
        run(count)  # the first time, much is compiled and learnt
        found[name] = calls_of(lambda run=run: run(count))
    return found


def tapped() -> None:
    """Calls in each step, by how many more a request makes with 16 steps than with one."""
    from tests import models
    from tests.engine.cohorts import host_of
    from tests.engine.taps import recorded

    table = Table("requests", "work", "calls a request and step", "more than plain vLLM", "of them insitu's own")
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 256, "taps": ["resid_post[1]"]}
    with insitu.VLLM(models.tiny("llama"), dispatch=True, **settings) as model, recorded(model):
        for count in (16, 256):
            plain = 0.0
            for name, run in cases(model).items():
                if "16 steps" not in name:
                    continue
                for together in (True, False) if "plain" not in name else (True,):
                    host_of(model).together = together
                    each, own = a_step(run, count)
                    plain = plain or each
                    what = "" if "plain" in name else ", together" if together else ", each alone"
                    table.add_row(str(count), name + what, f"{each:.1f}", f"{each - plain:+.1f}", f"{own:.1f}")
        print(model.stats())
    Console().print(table)


def a_step(run: Callable[[int], object], count: int) -> tuple[float, float]:
    """Calls a request and step after the first, and insitu's own of them."""
    steps, found = STEPS["max_tokens"], list[Counter[str]]()
    for STEPS["max_tokens"] in (1, steps):
        run(count), run(count)
        found.append(calls_of(lambda: run(count)))
    begun, whole = found
    more = whole.total() - begun.total(), whole.total() - whole[""] - begun.total() + begun[""]
    return more[0] / count / (steps - 1), more[1] / count / (steps - 1)


def main() -> None:
    from tests import models

    table = Table("requests together", "work", "calls a request", "more than plain vLLM", "of them insitu's own")
    with insitu.VLLM(
        models.tiny("llama"), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=1024
    ) as model:
        model.dispatch()
        for count in COUNTS:
            found = measured(model, count)
            for name, calls in found.items():
                plain = found["plain vLLM, 16 steps" if "16 steps" in name else "plain vLLM"].total() / count
                each = calls.total() / count
                own = (calls.total() - calls[""]) / count
                table.add_row(str(count), name, f"{each:.0f}", f"{each - plain:+.0f}", f"{own:.0f}")
            where = found["one place, invokes"]
            print(count, {room: round(number / count, 1) for room, number in where.most_common() if room})
    Console().print(table)


if __name__ == "__main__":
    tapped() if sys.argv[1:2] == ["taps"] else main()
