"""How cost grows: with the number of requests, of places, of tokens and of bytes that are saved.

On a tiny model, where the engine's own work is small. Each point is the median of rounds, by turns with plain vLLM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.comparison import BASE, timed
from benchmarks.sweep import GREEDY, cases

Curve = dict[int, dict[str, list[float]]]
"""By what grows: of each case the median, least and largest microseconds of the processor a request."""
Run = Callable[[list[list[int]]], object]
COMPANY = 64


def requests(model: Any, counts: Iterable[int], rounds: int) -> Curve:
    return {count: _measured(model, cases(model), count, 8, rounds) for count in counts}


def places(model: Any, rounds: int) -> Curve:
    """The last token of one place, and of the residual stream before, in and after each of the first layers."""
    layers = len(model.resid_post)
    some = 0

    def one(tracer: Any) -> Any:
        return model.resid_post[0][-1]

    def several(tracer: Any) -> Any:
        found = []
        for layer in range(some):
            found += [model.resid_pre[layer][-1], model.resid_mid[layer][-1], model.resid_post[layer][-1]]
        return found

    curve: Curve = {}
    for some in range(layers + 1):
        read = several if some else one
        run = _beside_plain(model, "saved", lambda prompts, read=read: model.run(read, prompts, **GREEDY))
        curve[3 * some or 1] = _measured(model, run, COMPANY, 8, rounds)
    return curve


def tokens(model: Any, counts: Iterable[int], rounds: int) -> Curve:
    middle = len(model.resid_post) // 2

    def read(prompts: list[list[int]]) -> None:
        model.run(lambda tracer: model.resid_post[middle], prompts, **GREEDY)

    found = _beside_plain(model, "one place saved whole", read)
    return {count: _measured(model, found, COMPANY, count, rounds) for count in counts}


def saved_bytes(model: Any, length: int, rounds: int) -> Curve:
    """So many bytes a request: the first rows of all layers."""
    layers, width = len(model.resid_post), model.vllm_entrypoint.model_config.get_hidden_size()
    curve: Curve = {}
    rows = 1

    def read(tracer: Any) -> Any:
        return [model.resid_post[layer][:rows] for layer in range(layers)]

    def run(prompts: list[list[int]]) -> None:
        model.run(read, prompts, **GREEDY)

    while rows <= length:
        curve[rows * layers * width * 4] = _measured(model, _beside_plain(model, "saved", run), COMPANY, length, rounds)
        rows *= 4
    return curve


def _beside_plain(model: Any, name: str, run: Run) -> dict[str, Run]:
    return {BASE: cases(model)[BASE], name: run}


def _measured(model: Any, runs: dict[str, Run], count: int, length: int, rounds: int) -> dict[str, list[float]]:
    vocabulary = model.vllm_entrypoint.model_config.get_vocab_size()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            prompts = torch.randint(4, vocabulary - 4, (count, length)).tolist()
            took = timed(lambda run=run, given=prompts: run(given))["cpu"] / count * 1e6
            if turn:
                taken[name].append(took)
    return {name: [statistics.median(each), min(each), max(each)] for name, each in taken.items()}


def table(curve: Curve, what: str) -> str:
    names = list(next(iter(curve.values())))
    lines = [f"| {what} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for point, found in curve.items():
        cells = (f"{middle:.0f} ({least:.0f} to {most:.0f})" for middle, least, most in found.values())
        lines.append(f"| {point} | {' | '.join(cells)} |")
    return "\n".join(lines)
