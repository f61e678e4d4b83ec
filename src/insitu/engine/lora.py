"""LoRA adapters as traced requests need them: applied to rows that a block makes, and checked before they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform

from insitu.block import ArgumentError
from insitu.run import tensors_of
from insitu.tree import current


@dataclass(frozen=True)
class Fit:
    """Which modules of an adapter the model has, and the name in the model nearest to the first that it has not."""

    applied: int
    missing: tuple[str, ...]
    nearest: str = ""


class Loras:
    """The adapters of one worker. ``manager``: vLLM's own of its model runner."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        if current_platform.is_cpu():
            _leave_base_rows_alone()

    def known(self) -> set[str]:
        """The names by which an adapter's file may call the modules of this worker."""
        adapters = self._manager._adapter_manager
        known: set[str] = set()
        for name in adapters.modules:
            known.update((name, f"{name}.base_layer", *adapters.packed_modules.get(name, ())))
        if adapters.is_pooling_model:
            known |= {name.removeprefix("model.") for name in known}
        return known

    def fit(self, request: Any, elsewhere: Collection[str] = ()) -> Fit:
        """Reads an adapter and tells which of its modules the model has; nothing stays loaded. ``elsewhere``: what
        other stages of a pipeline know.

        vLLM itself reads it inside a step, where an error ends the engine, and passes over in silence what
        the model has not. Its own errors on an adapter (no such folder, too high a rank) pass through.
        """
        known = self.known().union(elsewhere)
        names = list(self._manager._load_adapter(request).loras)
        missing = tuple(name for name in names if name not in known)
        near = get_close_matches(missing[0], sorted(known), n=1, cutoff=0) if missing else ()
        return Fit(len(names) - len(missing), missing, *near)

    @contextmanager
    def beside(self, given: Any) -> Iterator[None]:
        """While a block calls a module on values of its own: they get its request's adapter, whatever rows
        the step has."""
        adapters = self._manager._adapter_manager
        before = adapters._last_mapping
        rows = _rows(given)
        if rows > adapters.max_num_batched_tokens:
            raise ArgumentError(
                f"{rows} rows at once, but an engine with adapters has room for {adapters.max_num_batched_tokens}: "
                f"call it on fewer, or raise max_num_batched_tokens"
            )
        lora = getattr(current.get(), "adapter", None)
        ids = (lora.lora_int_id if lora else 0,) * rows
        self._manager.set_active_adapters({lora} if lora else set(), LoRAMapping(ids, ids, is_prefill=True))
        try:
            yield
        finally:
            # Between steps those of the last one may be gone; the next step sets its own.
            if before is not None and {0, *filter(None, adapters.lora_index_to_id)} >= {*before.index_mapping}:
                adapters.set_adapter_mapping(before)


def require_applied(request: Any, fit: Fit) -> str | None:
    """What is to be said of an adapter of which the model has only a part.

    Raises ``ArgumentError`` if it has nothing of it, so that it would do nothing.
    """
    if not fit.missing:
        return None
    said = (
        f"adapter {request.lora_name!r} ({request.lora_path}): of its {fit.applied + len(fit.missing)} modules this "
        f"model has {fit.applied}. It has no `{fit.missing[0]}`; the nearest is `{fit.nearest}`"
    )
    if not fit.applied:
        raise ArgumentError(f"{said}. The names in the adapter's file are to be those of this model")
    return f"{said}. The rest of the adapter is not applied"


def _rows(given: Any) -> int:
    found = tensors_of(given)
    return found[0].shape[:-1].numel() if found else 0


def _leave_base_rows_alone() -> None:
    """vLLM's kernels for the CPU take the index -1 of a row without adapter for the last adapter there is."""
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        kernel = getattr(lora_ops, name)
        if not isinstance(kernel, _Masked):
            for namespace in (lora_ops, punica_cpu):
                setattr(namespace, name, _Masked(kernel))


class _Masked:
    """A kernel ``(inputs, weights, output, indices, ...)`` that adds nothing to rows of index -1."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        self._kernel = kernel

    def __call__(
        self,
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if len(inputs) == len(indices):
            inputs = inputs.masked_fill((indices < 0)[:, None], 0)
        self._kernel(inputs, weights, output, indices, *args, **kwargs)
