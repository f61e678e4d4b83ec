"""A block beside many prompts, next to other ways to the same values, by turns and in the same run."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweep import Case

WORKS = {
    "one": "one place saved",
    "steps": "one place saved at every step",
    "last": "every layer's last token",
    "every": "every layer saved",
    "vectors": "a vector each",
}
BASE, OURS = "plain vLLM", "insitu"
Seconds = dict[str, dict[str, list[float]]]


class Peer:
    """One of `benchmarks.peers` in a process of its own. `error`: why it can't run, or could not run its last work."""

    def __init__(self, kind: str, python: str, folder: str, settings: Mapping[str, Any]) -> None:
        self.error = ""
        self._failed: set[str] = set()
        command = [python, str(Path(__file__).with_name("peers.py")), kind, folder, json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            self.error = str(error)
        self._up = not self.error and "works" in self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process has ended"}
        self._up = bool(line)
        self.error = answer.get("error", "")
        return answer

    def run(self, work: str, prompts: list[list[int]]) -> dict[str, float]:
        """Seconds by clock and of the processor; nothing if it failed, now or before."""
        if not self._up or work in self._failed:
            return {}
        assert self._process.stdin is not None
        print(json.dumps({"work": work, "prompts": prompts}), file=self._process.stdin, flush=True)
        answer = self._hear()
        if not self.error:
            return answer
        self._failed.add(work)
        return {}

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()


def started(peers: Mapping[str, str], folder: str, settings: Mapping[str, Any]) -> dict[str, Peer]:
    """`peers`: the interpreter of each kind."""
    return {_titled(kind): Peer(kind, python, folder, settings) for kind, python in peers.items()}


def compared(
    base: Case, own: Mapping[str, Case], vocabulary: int, others: Mapping[str, Peer], chosen: Any
) -> list[dict[str, Any]]:
    """Rows of `chosen.works` and system: seconds of `chosen.rounds` rounds of `chosen.prompts` prompts of
    `chosen.tokens` tokens. The peers are closed in the end.
    `base`: by vLLM's own `LLM`, in this process as `own` is, since processes differ by a quarter in how their memory
    lies."""
    rows: list[dict[str, Any]] = []
    try:
        for work, title in ((work, WORKS[work]) for work in chosen.works):
            found: Seconds = {name: {"wall": [], "cpu": []} for name in (BASE, *others, OURS)}
            for turn in range(chosen.rounds + 1):
                for name in found:
                    prompts = torch.randint(4, vocabulary - 4, (chosen.prompts, chosen.tokens)).tolist()
                    run = {BASE: base, OURS: own[title]}.get(name)
                    took = others[name].run(work, prompts) if run is None else timed(partial(run, prompts))
                    for clock, seconds in took.items() if turn else ():
                        found[name][clock].append(seconds)
            measured = _rows(title, found, {name: other.error for name, other in others.items()})
            print(table(measured), flush=True)  # what is known, should the rest take too long
            rows += measured
    finally:
        for other in others.values():
            other.close()
    return rows


def vocabulary_of(model: Any) -> int:
    return model.vllm_entrypoint.model_config.get_vocab_size()


def timed(run: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def _titled(kind: str) -> str:
    return {"transformers": "transformers, forward hooks", "nnsight": "nnsight on transformers"}.get(kind, kind)


def _rows(title: str, found: Seconds, errors: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for name, seconds in found.items():
        row: dict[str, Any] = {"work": title, "system": name, "seconds": seconds}
        if not seconds["wall"]:
            row["error"] = errors[name]
        else:
            for clock, values in seconds.items():
                ratios = [base / value for base, value in zip(found[BASE][clock], values, strict=True)]
                row[clock] = [statistics.median(values), min(values), max(values)]
                row[f"{clock}_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown. Speeds are to plain vLLM's in the same round: the median, and the least and largest."""
    lines = ["| work | system | seconds | speed | processor seconds | speed |", "|---|---|---|---|---|---|"]
    for row in rows:
        if "error" in row:
            cells = [f"can't run: {' '.join(row['error'].split())[:160]}", "", "", ""]
        else:
            cells = [_spread(row[key]) for key in ("wall", "wall_ratio", "cpu", "cpu_ratio")]
        lines.append(f"| {row['work']} | {row['system']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    middle, least, most = values
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"
