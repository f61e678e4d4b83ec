"""Sweeps of one block over many prompts, beside plain vLLM in the same run. `python -m benchmarks.sweep --help`

Each case by turns, with new prompts each time. Wall time and processor time, the median of the rounds and their
spread; as a table, as JSON and Markdown (`--out FOLDER`), and as a picture of cost against the number of requests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import torch
from rich.console import Console
from rich.table import Table
from vllm import SamplingParams

import insitu

GREEDY = {"temperature": 0.0, "max_tokens": 1}
Case = Callable[[list[list[int]]], object]


def plain_of(llm: Any) -> Case:
    def plain(prompts: list[list[int]]) -> None:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        llm.generate(given, SamplingParams(**GREEDY, skip_reading_prefix_cache=True), use_tqdm=False)

    return plain


def cases(model: Any) -> dict[str, Case]:
    llm, layers = model.vllm_entrypoint, len(model.resid_post)
    middle, width = layers // 2, llm.model_config.get_hidden_size()
    device = llm.llm_engine.vllm_config.device_config.device

    def one(prompts: list[list[int]]) -> None:
        model.run(lambda tracer: model.resid_post[middle], prompts, **GREEDY)

    def every(prompts: list[list[int]]) -> None:
        model.run(lambda tracer: [model.resid_post[layer] for layer in range(layers)], prompts, **GREEDY)

    def last(prompts: list[list[int]]) -> None:
        model.run(lambda tracer: [model.resid_post[layer][-1] for layer in range(layers)], prompts, **GREEDY)

    def vectors(prompts: list[list[int]]) -> None:
        added = torch.randn(len(prompts), width).to(device, llm.model_config.dtype)
        with model.trace(**GREEDY) as tracer:
            for ids, vector in zip(prompts, added, strict=True):
                with tracer.invoke(ids):
                    model.resid_post[middle][:] += vector
                    logits = model.logits.save()

    own = {"one place saved": one, "every layer's last token": last, "every layer saved": every}
    return {"plain vLLM": plain_of(llm), **own, "a vector each": vectors}


def measured(model: Any, count: int, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in cases(model)}
    vocabulary = model.vllm_entrypoint.model_config.get_vocab_size()
    for turn in range(rounds + 1):
        for name, run in cases(model).items():
            prompts = torch.randint(4, vocabulary - 4, (count, tokens)).tolist()
            wall, cpu = time.perf_counter(), time.process_time()
            run(prompts)
            if turn:
                found[name]["wall"].append(time.perf_counter() - wall)
                found[name]["cpu"].append(time.process_time() - cpu)
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Of each case the medians, and its ratios to plain vLLM: of the same round, the median, least and largest."""
    plain, rows = found["plain vLLM"], []
    for name, seconds in found.items():
        row: dict[str, Any] = {"case": name}
        for clock, values in seconds.items():
            ratios = [base / value for base, value in zip(plain[clock], values, strict=True)]
            row[clock] = statistics.median(values)
            row[f"{clock}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        rows.append(row)
    return rows


def tables(rows: list[dict[str, Any]], title: str) -> tuple[Table, str]:
    head = ("case", "seconds", "of plain vLLM (least, largest)", "processor seconds", "of plain vLLM")
    table, lines = Table(*head, title=title), [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        (wall, least, most), cpu = row["wall_ratio"], row["cpu_ratio"][0]
        cells = (row["case"], f"{row['wall']:.2f}", f"{wall:.2f} ({least:.2f}, {most:.2f})", f"{row['cpu']:.2f}")
        table.add_row(*cells, f"{cpu:.2f}")
        lines.append(f"| {' | '.join((*cells, f'{cpu:.2f}'))} |")
    return table, "\n".join(lines)


def growth(model: Any, counts: list[int], rounds: int) -> dict[int, dict[str, float]]:
    """Processor time a request, in microseconds, by the number of requests."""
    found: dict[int, dict[str, float]] = {}
    for count in counts:
        seconds = measured(model, count, 8, rounds)
        found[count] = {name: statistics.median(each["cpu"]) / count * 1e6 for name, each in seconds.items()}
    return found


def picture(found: dict[int, dict[str, float]], file: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4)).subplots()
    for name in next(iter(found.values())):
        axes.plot(list(found), [each[name] for each in found.values()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="requests together", ylabel="processor time a request, µs")
    axes.legend()
    axes.figure.savefig(file)  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth", type=int, nargs="*", default=[1, 16, 64, 256, 1024, 4096], help="on a tiny model")
    parser.add_argument("--eager", action="store_true", help="an engine that is not compiled")
    parser.add_argument("--out", type=Path, help="folder for sweep.json, sweep.md and sweep.png")
    chosen = parser.parse_args()
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 1024}
    grown: dict[int, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    text = ""
    if chosen.prompts:
        with insitu.VLLM(insitu.demo_model(), dispatch=True, enforce_eager=chosen.eager, **settings) as model:
            rows = summary(measured(model, chosen.prompts, chosen.tokens, chosen.rounds))
            print(model.stats())
        table, text = tables(rows, f"{chosen.prompts} prompts of {chosen.tokens} tokens")
        Console().print(table)
    if chosen.growth:
        from tests import models

        tiny = {**settings, "enforce_eager": True, "max_num_batched_tokens": 8192}
        with insitu.VLLM(models.tiny("llama"), dispatch=True, **tiny) as model:
            grown = growth(model, chosen.growth, chosen.rounds)
            print(model.stats())
        table = Table("requests together", *next(iter(grown.values())), title="processor time a request, µs")
        for count, each in grown.items():
            table.add_row(str(count), *(f"{value:.0f}" for value in each.values()))
        Console().print(table)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "sweep.json").write_text(json.dumps({"rows": rows, "growth": grown}, indent=1))
        (chosen.out / "sweep.md").write_text(text + "\n")
        if grown:
            picture(grown, chosen.out / "sweep.png")


if __name__ == "__main__":
    main()
