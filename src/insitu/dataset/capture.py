"""Captures what a model computes on a data set, and goes on where an earlier run of the same capture has ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.dataset.built import model_for
from insitu.dataset.captured import Captured
from insitu.dataset.distributed import PARTS, capture_on_ray
from insitu.dataset.errors import CaptureError
from insitu.dataset.plan import Estimate, Plan
from insitu.dataset.prompts import prompts_of
from insitu.dataset.reading import PHASES, Phase
from insitu.dataset.store import Store
from insitu.dataset.tokens import Tokens
from insitu.engine.client.model import VLLM


def capture(
    model: VLLM | str,
    data: Any,
    *,
    at: str | Sequence[str],
    out: str | os.PathLike[str],
    positions: Any = "all",
    phase: Phase = "prompt",
    dtype: torch.dtype | str | None = None,
    apply: Any = None,
    column: str | None = None,
    truncate: int | None = None,
    shard_bytes: int = 2**30,
    window_tokens: int | None = None,
    dry_run: bool = False,
    progress: bool = True,
    ray: str | None = None,
    workers: int | None = None,
    **sampling: Any,
) -> Captured | Estimate:
    """Writes what ``model`` computes at the places ``at``, for each prompt of ``data``, to the folder ``out``.

    ``model``: a ``VLLM``, or what names one, whose engine then has taps at the places where it can. ``data``: a text,
    JSON-lines, Parquet or CSV file, a folder of them, a list of prompts or rows, or a data set of the library
    ``datasets``; ``column`` names the column with the prompts (text, token ids or chats).
    ``at``: standard names and modules, as ``resid_post[4:8]``, ``model.layers.*.mlp.output``,
    ``model.layers.3.output[0]``, ``logits``.

    ``positions``: which of the prompt's tokens: ``"all"``, ``"last"``, a number, a slice, or ``"text:Paris"``, the
    tokens of a piece of the prompt. ``phase``: the rows of the ``"prompt"``, of the tokens ``"generated"`` (each but
    the last goes through the model), or ``"all"``; ``sampling`` are then the sampling parameters. ``dtype``: of what
    is written, the model's if left out. ``apply``: a function of the rows ``[rows, width]`` of a prompt at a place,
    run in the engine; ``"mean"``, ``"project:FILE.safetensors"``, ``"sae:FILE.safetensors"`` (the features of a sparse
    autoencoder), ``"FILE.py:NAME"``. ``truncate``: prompts are cut to
    so many tokens.

    Shards have at most ``shard_bytes`` of values, unless one prompt has more; a shard is held in memory until it is
    written. Prompts run together by windows of ``window_tokens``, or as many as make 256 MiB (1024 to 65536), and of
    at most 2048 prompts. Run again after it was stopped, killed or ran out of disk, the same capture goes on with the
    window in which its last shard ends, and what comes out is what one run would have written. A prompt without tokens
    is in the index, with no rows.

    ``ray``: the address of a Ray cluster (``"auto"``, ``"local"`` for one of this machine alone). ``workers`` engines
    (one for each GPU, or one) then share the work; each is built where it runs, of a ``model`` whose engine is not
    built yet, and ``out`` is a folder that all of them see. What a worker that is lost had not written is done again.
    Shards end where a worker's part of the data does.

    ``dry_run`` returns an ``Estimate`` and writes nothing. Raises ``CaptureError``; ``ArgumentError`` for arguments.
    """
    if phase not in PHASES:
        raise ArgumentError(f"phase={phase!r}: it is one of {', '.join(map(repr, PHASES))}")
    if phase == "prompt":
        sampling = {"temperature": 0.0, "max_tokens": 1, **sampling}
    if ray is not None and not dry_run:
        settings = {
            "data": data,
            "at": at,
            "positions": positions,
            "phase": phase,
            "dtype": dtype,
            "apply": apply,
            "column": column,
            "truncate": truncate,
            "shard_bytes": shard_bytes,
            "window_tokens": window_tokens,
            **sampling,
        }
        return capture_on_ray(model, Path(out), ray, workers, progress, settings)
    prompts_of(data, column)  # refused before an engine is built
    if (Path(out) / PARTS).exists():
        raise CaptureError(f"the capture in {out} was begun with several workers: go on with it with `ray`")
    owned = model_for(model, at, {}) if isinstance(model, str) else None
    used = owned or model
    if not isinstance(used, VLLM):
        raise ArgumentError(
            f"model is a name, a folder or an `insitu.VLLM(...)` without mode='async'; got {type(used).__name__}"
        )
    try:
        tokens = Tokens(used, data, column, truncate)
        plan = Plan(used, tokens, at, positions, phase, dtype, apply, sampling, window_tokens)
        if dry_run:
            return plan.estimate(shard_bytes)
        store = Store(Path(out), [str(one) for one in plan.places], plan.arguments(shard_bytes), shard_bytes)
        try:
            plan.run(store, progress)
        finally:
            store.close()
        return Captured(Path(out))
    finally:
        if owned is not None:
            owned.close()
