"""What a server has done, on vLLM's own ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from insitu.engine.client.async_model import AsyncVLLM

_PATIENCE = 5.0

TRACES = Counter("insitu_traces", "Traces begun, by what they are: trace, form, openai, generate or edit", ["kind"])
FAILURES = Counter("insitu_trace_failures", "Traces in which a block or its request failed, or was refused", ["kind"])
SAVED = Counter("insitu_saved_bytes", "Bytes of the tensors that were saved and sent to clients")


def saved(value: Any) -> None:
    """Counts the tensors in a saved value."""
    if isinstance(value, torch.Tensor):
        SAVED.inc(value.nbytes)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            saved(each)
    elif isinstance(value, dict):
        for each in value.values():
            saved(each)


@contextlib.contextmanager
def counted(kind: str) -> Iterator[None]:
    """One trace, which has failed if an error leaves it."""
    TRACES.labels(kind).inc()
    try:
        yield
    except Exception:
        FAILURES.labels(kind).inc()
        raise


class EngineMetrics(Collector):
    """The workers' own counts, as they were when ``refresh`` last asked for them."""

    def __init__(self, model: AsyncVLLM) -> None:
        self._model = model
        self._stats: Any = None
        REGISTRY.register(self)

    async def refresh(self) -> None:
        """An engine that does not answer leaves them as they were."""
        with contextlib.suppress(Exception):
            self._stats = await asyncio.wait_for(self._model.stats(), _PATIENCE)

    def collect(self) -> Iterator[Metric]:
        steps = CounterMetricFamily("insitu_steps", "Steps of the engine, by the path that they took", labels=["path"])
        seconds = CounterMetricFamily(
            "insitu_block_seconds", "Seconds in which blocks ran, what they wait for left out"
        )
        if self._stats is not None:
            for path in ("eager", "plain", "tapped"):
                steps.add_metric([path], getattr(self._stats, f"{path}_steps"))
            seconds.add_metric([], self._stats.block_seconds)
        yield steps
        yield seconds
