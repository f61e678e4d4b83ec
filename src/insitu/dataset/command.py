"""``insitu capture``, once its arguments are read."""

from __future__ import annotations

import argparse
from typing import Any

from insitu.dataset.arguments import value_of
from insitu.dataset.built import model_for
from insitu.dataset.capture import capture
from insitu.dataset.prompts import prompts_of
from insitu.engine.client.model import VLLM


def run(arguments: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    prompts_of(arguments.data, arguments.column)  # refused before an engine is built
    alone = arguments.ray is None
    built = model_for(arguments.model, arguments.at, engine_args) if alone else VLLM(arguments.model, **engine_args)
    with built as model:
        found = capture(
            model,
            arguments.data,
            at=arguments.at,
            out=arguments.out,
            positions=value_of(arguments.positions),
            phase=arguments.phase,
            dtype=arguments.dtype,
            apply=arguments.apply,
            column=arguments.column,
            truncate=arguments.truncate,
            shard_bytes=arguments.shard_bytes,
            window_tokens=arguments.window_tokens,
            dry_run=arguments.dry_run,
            ray=arguments.ray,
            workers=arguments.workers,
            **dict(arguments.sampling or []),
        )
    print(found)
    return 0
