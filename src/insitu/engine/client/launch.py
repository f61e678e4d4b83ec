"""Builds vLLM's engine in this process, with insitu's worker extension and scheduler in it."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import vllm
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from vllm import LLM
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import core as engine_core

from insitu.block import ArgumentError, EngineError
from insitu.engine.client.copies import copies_refusal, require_one_front
from insitu.engine.client.experts import ensure_expert_group
from insitu.engine.names import require_known
from insitu.engine.taps.install import KEY

OURS = {
    "worker_extension_cls": "insitu.engine.worker.worker.InsituWorker",
    "scheduler_cls": "insitu.engine.worker.scheduler.TracedScheduler",
}
_GIB = 2**30
_SPLIT = {
    "enable_batch_sharded_sampling": ("enable_batch_sharded_sampling", "each rank has the logits of its own requests"),
    "use_ubatching": ("enable_dbo or ubatch_size", "the rows of a step run in parts beside each other"),
}
"""What blocks are not shown whole then: of vLLM's parallel config, with what it is set by and why. The first is new in
0.32."""
_TENSOR, _PIPELINE, _DATA = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"


def needs_workers(engine_args: Mapping[str, Any]) -> bool:
    """Whether the model has several ranks, or its executor was chosen."""
    several = any((engine_args.get(name) or 1) > 1 for name in (_TENSOR, _PIPELINE))
    return several or engine_args.get("distributed_executor_backend") not in (None, "uni")


def launch(repo: str, engine_args: Mapping[str, Any], taps: Sequence[str] = (), workers: bool = False) -> LLM:
    """The engine that ``vllm.LLM(repo, **engine_args)`` builds, its model in this process or in workers.

    Raises ``ArgumentError`` for an argument that vLLM does not have, ``EngineError`` if there is no
    such model or it is of a kind that insitu can't trace.
    """
    args = checked_args(repo, engine_args, taps, workers, EngineArgs)
    if not workers and needs_workers(engine_args):
        raise ArgumentError("engine='in-process' runs one rank: leave `engine` out, and workers are used as needed")
    with _in_process(), _output_with_descriptor():
        if not workers:
            ensure_expert_group()
        llm = LLM(repo, **args)
    error = refusal(repo, llm.llm_engine.vllm_config)
    if error is not None:
        shut_down(llm)
        del llm
        free_engines()
        raise error
    return llm


def checked_args(
    repo: str, engine_args: Mapping[str, Any], taps: Sequence[str], workers: bool, kind: type[EngineArgs]
) -> dict[str, Any]:
    """What vLLM is called with for an engine that blocks can get into, all that can be refused before refused."""
    known = {field.name for field in dataclasses.fields(kind)} - {"model"}
    require_known(engine_args, known, f"an engine argument of vLLM {vllm.__version__}")
    for name in OURS:
        if engine_args.get(name):
            raise ArgumentError(f"`{name}` is set by insitu itself, which gets into the engine by it")
    require_one_front(engine_args)
    if not issubclass(kind, AsyncEngineArgs) and (engine_args.get(_DATA) or 1) > 1:
        raise ArgumentError(
            f"`{_DATA}`: vLLM runs several copies of a model for requests that are awaited alone: add mode='async', "
            f"or use `insitu serve`"
        )
    _refuse_what_is_not_there_yet(engine_args, taps)
    if workers:
        engine_args = {"distributed_executor_backend": "mp", **engine_args}
    _require_model(repo)
    return {**cpu_memory(engine_args), **engine_args, **OURS, **_with_taps(engine_args, taps)}


def refusal(repo: str, config: VllmConfig) -> EngineError | None:
    """Of a kind of model that can't be traced, known once vLLM has read its config."""
    model = config.model_config
    kind = "encoder-decoder" if model.is_encoder_decoder else model.runner_type
    if kind != "generate":  # an encoder's part of the forward has rows of its own, which blocks are not shown yet
        return EngineError(f"`{repo}` is a {kind} model; insitu traces models that generate text")
    for name in (_TENSOR, _PIPELINE):
        if getattr(config.parallel_config, name) > 1 and model.using_transformers_backend():
            return EngineError(
                f"`{repo}` has no model class in vLLM, which runs transformers' own code for it; insitu traces such "
                f"models on one rank only: leave {name} out"
            )
    for name, (setting, why) in _SPLIT.items():
        if getattr(config.parallel_config, name, False):
            return EngineError(f"{setting}: {why}, of which blocks would be shown a part alone; leave it out")
    return copies_refusal(repo, config)


def _refuse_what_is_not_there_yet(engine_args: Mapping[str, Any], taps: Sequence[str]) -> None:
    if (engine_args.get(_PIPELINE) or 1) > 1:
        beside = [_TENSOR] * ((engine_args.get(_TENSOR) or 1) > 1)
        for name in (*beside, *["taps"] * bool(taps)):
            raise ArgumentError(f"`{_PIPELINE}`: this version has no `{name}` beside it; leave one of the two out")


def _with_taps(engine_args: Mapping[str, Any], taps: Sequence[str]) -> dict[str, Any]:
    if not taps:
        return {}
    given = engine_args.get("additional_config") or {}
    if not isinstance(given, dict):
        raise ArgumentError("taps travel to the workers in vLLM's additional_config, which must be a dict or left out")
    return {"additional_config": {**given, KEY: list(taps)}}


def free_engines() -> None:
    """Frees engines that nobody holds any more, at once: torch does not bear it while it compiles another."""
    gc.collect()
    gc.collect()  # what the finalizers of the first have let go of


def shut_down(llm: LLM) -> None:
    """Stops an engine, and leaves the process groups alone, which all engines of the process share."""
    namespace = engine_core.__dict__
    tear_down = namespace["cleanup_dist_env_and_memory"]
    namespace["cleanup_dist_env_and_memory"] = lambda: None
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        namespace["cleanup_dist_env_and_memory"] = tear_down
        # The pool that graphs of all engines share is gone with the last of them, which vLLM does not note.
        type(current_platform)._global_graph_pool = None


def cpu_memory(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """A modest KV cache on the CPU, where vLLM by itself takes nearly all memory and fails if it is in use."""
    chosen = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & engine_args.keys()
    if not current_platform.is_cpu() or chosen or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return {}
    most = os.environ.get("INSITU_CPU_KVCACHE_BYTES") or 4 * _GIB  # vLLM's variable counts whole GiB
    return {"kv_cache_memory_bytes": min(int(most), psutil.virtual_memory().available // 4)}


@contextmanager
def _in_process() -> Iterator[None]:
    """vLLM reads this variable while it builds an engine; other engines of the user keep theirs."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _output_with_descriptor() -> Iterator[None]:
    """vLLM redirects the descriptor of ``sys.stdout`` while it starts; a notebook's or a test's has none."""
    shown = sys.stdout
    try:
        shown.fileno()
    except (AttributeError, OSError, ValueError):
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            try:
                yield
            finally:
                sys.stdout = shown
    else:
        yield


def _require_model(repo: str) -> None:
    """Says plainly that a folder or repository is not there, which vLLM says only in passing."""
    if os.path.isdir(repo):
        if not any(name.endswith((".json", ".gguf")) for name in os.listdir(repo)):
            raise EngineError(f"the folder `{repo}` holds no model: it has no config.json")
        return
    if os.path.isfile(repo) or "://" in repo:
        return
    if repo.startswith(("/", ".", "~")) or repo.count("/") > 1:
        raise EngineError(f"there is no folder `{repo}`")
    try:
        hf_hub_download(repo, "config.json")
    except LocalEntryNotFoundError as error:
        raise EngineError(
            f"`{repo}` is neither a folder nor in the local cache, and the Hub can't be reached (no network, or "
            f"HF_HUB_OFFLINE is set): give the path of a folder, or download it while online"
        ) from error
    except EntryNotFoundError:
        return  # no config.json, but a repository: vLLM knows other formats
    except (OSError, ValueError) as error:
        raise EngineError(f"`{repo}` is neither a folder nor a repository of the Hub: {error}") from error
