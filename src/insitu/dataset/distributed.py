"""One capture by several workers: each has an engine of its own, and takes parts of the data until none is left.

A part is a capture of its own, which goes on where a worker was lost. When all are there, their shards become those of
one capture. Ray Data drives the workers; the folder has to be one that all of them see.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from insitu.block import ArgumentError, InsituError
from insitu.dataset.built import model_for
from insitu.dataset.captured import Captured
from insitu.dataset.errors import CaptureError
from insitu.dataset.prompts import Part, prompts_of
from insitu.dataset.store import MANIFEST, locked, put
from insitu.engine.client.model import VLLM
from insitu.engine.client.view import made_of

PARTS = "parts"
_PARTS_A_WORKER = 4


class Worker:
    """Has an engine for as long as there are parts for it. Called by Ray Data with a batch of one part."""

    def __init__(self, repo: str, engine_args: Mapping[str, Any], settings: Mapping[str, Any], out: Path) -> None:
        self._model = model_for(repo, settings["at"], engine_args)
        self._settings = dict(settings)
        self._out = out

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        from insitu.dataset.capture import capture

        number, start, stop = (int(batch[name][0]) for name in ("number", "start", "stop"))
        part = Part(self._settings["data"], self._settings["column"], start, stop)
        settings = {**self._settings, "data": part, "column": None}
        try:
            capture(self._model, out=_part(self._out, number), progress=False, **settings)
        except InsituError as error:
            # Of an exception that is raised here Ray would give the driver the text alone.
            return {"error": [pickle.dumps(_told(error))]}
        return {"error": [b""]}


def capture_on_ray(
    model: VLLM | str, out: Path, address: str, workers: int | None, progress: bool, settings: Mapping[str, Any]
) -> Captured:
    """``settings``: what else ``capture`` takes. Raises ``CaptureError`` if the folder holds another capture."""
    ray = _ray()
    repo, engine_args = _made_of(model)
    if isinstance(settings["data"], (str, Path)):
        settings = {**settings, "data": Path(settings["data"]).resolve()}
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    ray.data.DataContext.get_current().enable_progress_bars = progress
    out.mkdir(parents=True, exist_ok=True)
    lock = locked(out)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        ranks = int(engine_args.get("tensor_parallel_size", 1))
        count = workers or max(gpus // ranks, 1)
        parts = _parts(out, settings, count)
        _run(ray, (repo, engine_args, settings, out.resolve()), parts, count, ranks if gpus else 0)
        _join(out, len(parts))
        return Captured(out)
    finally:
        lock.close()
        if started:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise ArgumentError("capturing with several workers needs Ray: pip install 'insitu[ray]'") from error
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"ray: there is no cluster at {address!r} that lets this process in ({error}); if it asks for a "
            "token, as Ray's own default is, have the token here and set RAY_AUTH_MODE=token"
        ) from error


def _made_of(model: VLLM | str) -> tuple[str, dict[str, Any]]:
    """What each worker makes its model of."""
    if isinstance(model, str):
        return model, {}
    if model.dispatched:
        raise ArgumentError("ray: each worker builds an engine of its own: give a model whose engine is not built yet")
    return made_of(model)


def _run(ray: Any, arguments: tuple[Any, ...], parts: list[tuple[int, int]], count: int, gpus: int) -> None:
    rows = [{"number": number, "start": start, "stop": stop} for number, (start, stop) in enumerate(parts)]
    todo = ray.data.from_items(rows, override_num_blocks=len(rows))
    done = todo.map_batches(
        Worker,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=count),
        num_gpus=gpus,
        fn_constructor_args=arguments,
    )
    for row in done.iter_rows():
        if row["error"]:
            raise pickle.loads(row["error"])


def _told(error: InsituError) -> InsituError:
    """One that can travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CaptureError(f"{type(error).__name__}: {error}")
    return error


def _parts(out: Path, settings: Mapping[str, Any], workers: int) -> list[tuple[int, int]]:
    """From where to where each part goes. A capture that is gone on with keeps its parts."""
    manifest, plan = out / MANIFEST, out / PARTS / "parts.json"
    if manifest.exists() and not plan.exists():
        how = "is complete: read it with insitu.Captured" if _complete(manifest) else "was begun without Ray"
        raise CaptureError(f"the capture in {out} {how}, or give another `out`")
    total = sum(1 for _ in prompts_of(settings["data"], settings["column"]))
    if plan.exists():
        parts = [(start, stop) for start, stop in json.loads(plan.read_text())]
        if parts[-1][1] != total:
            raise CaptureError(f"{out} holds a capture of {parts[-1][1]} prompts, and this data has {total}")
        return parts
    if not total:
        raise ArgumentError("data: there is no prompt in it")
    size = max(-(-total // (workers * _PARTS_A_WORKER)), 1)
    parts = [(start, min(start + size, total)) for start in range(0, total, size)]
    plan.parent.mkdir(exist_ok=True)
    put(plan.parent, plan.name, lambda file: file.write_text(json.dumps(parts)))
    return parts


def _complete(manifest: Path) -> bool:
    return bool(json.loads(manifest.read_text())["complete"])


# -- one capture of all parts ---------------------------------------------------------------


def _join(out: Path, count: int) -> None:
    """Moves shards of parts to where one capture has them. Stopped at any moment, it can be done again."""
    number = prompts = 0
    manifest: dict[str, Any] = {}
    for part in range(count):
        folder = _part(out, part)
        manifest = manifest or json.loads((folder / MANIFEST).read_text())
        for index in sorted(folder.glob("shard-*.parquet")):
            name = f"shard-{number:05d}"
            tensors = index.with_suffix(".safetensors")
            if tensors.exists():
                os.replace(tensors, out / f"{name}.safetensors")
            table = _renumbered(pq.read_table(index), prompts, f"{name}.safetensors")
            put(out, f"{name}.parquet", lambda file, table=table: pq.write_table(table, file, compression="zstd"))
            number += 1
        prompts += int(json.loads((folder / MANIFEST).read_text())["prompts"])
    manifest |= {"complete": True, "prompts": prompts, "shards": number}
    put(out, MANIFEST, lambda file: file.write_text(json.dumps(manifest, indent=2) + "\n"))
    (out / PARTS / "parts.json").unlink()  # first: without it, what is left of the folder is not gone on with
    shutil.rmtree(out / PARTS)


def _renumbered(table: pa.Table, before: int, shard: str) -> pa.Table:
    numbers = pa.array([number + before for number in table["number"].to_pylist()], pa.int64())
    columns = {"number": numbers, "shard": pa.array([shard] * len(table), pa.string())}
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table


def _part(out: Path, number: int) -> Path:
    return out / PARTS / f"part-{number:05d}"
