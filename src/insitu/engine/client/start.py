"""Starts the engine of a model: vLLM's, and the channel to its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insitu.engine.channel import Direct, Wired
from insitu.engine.client.engine import Engine
from insitu.engine.client.launch import launch, needs_workers, shut_down
from insitu.engine.standin import ClientSide


def start(repo: str, engine_args: Mapping[str, Any], taps: Sequence[str], model: Any, workers: bool | None) -> Engine:
    """``workers``: whether the model runs in worker processes; None: if it must."""
    workers = needs_workers(engine_args) if workers is None else workers
    llm = launch(repo, engine_args, taps, workers)
    channel = None
    try:
        channel = Wired(llm, ClientSide(model)) if workers else Direct(llm)
        return Engine(llm, channel, model._owner)
    except BaseException:
        shut_down(llm)
        if channel is not None:
            channel.close()
        raise
