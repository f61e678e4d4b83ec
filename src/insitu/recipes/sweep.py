"""Many runs of prompts that differ in one edit each, and what a metric says of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from insitu.block import save
from insitu.engine.client.model import VLLM
from insitu.recipes.metrics import Metric

AT_ONCE = 256


def scores(model: VLLM, runs: Sequence[tuple[Any, Callable[[], None]]], metric: Metric) -> list[float]:
    """The metric of the last token's logits for each run: a prompt, and what is done in its block before they come.

    All runs are requests of a few traces.
    """
    found: list[Any] = []
    for start in range(0, len(runs), AT_ONCE):
        score: Any = None
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            for prompt, edit in runs[start : start + AT_ONCE]:
                with tracer.invoke(prompt):
                    edit()
                    score = save(torch.as_tensor(metric(model.logits[0])).float())
        # Of a single invoke, the name comes back as itself.
        found += score if isinstance(score, list) else [score]
    return [float(one) for one in found]
