"""Attention modules, known by their attributes: which they are, and what their kernel makes of scores.

Only this belongs here: everything that is read off vLLM's attention modules and their backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from insitu.block import LocationError

# Backends whose treatment of scores was read. All keep scale, window, cap, slopes and sinks by the same names.
_KERNELS = {"CPUAttentionBackendImpl", "FlashAttentionImpl", "TritonAttentionImpl", "FlashInferImpl"}

_EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def is_attention(module: Any) -> bool:
    return hasattr(module, "kv_cache") and hasattr(module, "impl")


def require_heads(module: Any, what: str) -> None:
    """Raises ``LocationError`` for a kind of attention that has no keys and values by head of its own."""
    kind = type(module).__name__
    if hasattr(module, "kv_lora_rank") or not hasattr(module, "num_kv_heads"):
        raise LocationError(
            f"{what} is not known for {kind}, which keeps no keys by head (latent attention): read the projections "
            f"that it is given, by the modules' own names"
        )
    if getattr(module, "kv_sharing_target_layer_name", None) is not None:
        raise LocationError(
            f"{what} is not computed by this layer: it attends to the keys and values of "
            f"`{module.kv_sharing_target_layer_name}`"
        )


@dataclass(frozen=True)
class Kernel:
    """What the kernel of one attention module does with queries and keys.

    ``window``: how many keys a query sees, its own included. ``slopes`` are ALiBi's, ``sinks`` the scores
    of keys that take weight and give no value, both by head. ``kept`` and ``queries_kept``: how keys and
    queries are rounded before.
    """

    scale: float
    window: int | None = None
    cap: float = 0.0
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    kept: Kept | None = None
    queries_kept: Kept | None = None

    def pattern(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """``[heads, queries, keys]`` in float32, of ``[queries, heads, size]`` and ``[keys, kv_heads, size]``; the
        queries are those of the last keys. Raises ``LocationError`` where what there is of each head lies on
        several ranks."""
        if any(each is not None and each.numel() != q.shape[1] for each in (self.slopes, self.sinks)):
            raise LocationError(
                "`model.attn_pattern` is not known on several ranks for models with ALiBi or sinks, of which each rank "
                "knows its own heads': load the model with tensor_parallel_size=1 to read it"
            )
        with torch.autocast(q.device.type, enabled=False):
            return self._weights(self._scores(_as_kept(q, self.queries_kept), _as_kept(k, self.kept)))

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        queries, keys = len(q), len(k)
        grouped = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k).flatten(0, 1) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        at = torch.arange(keys, device=q.device)
        distance = at[keys - queries :, None] - at
        if self.slopes is not None:
            scores = scores - self.slopes.to(scores).reshape(-1, 1, 1) * distance
        unseen = distance < 0
        if self.window is not None:
            unseen = unseen | (distance >= self.window)
        return scores.masked_fill(unseen, float("-inf"))

    def _weights(self, scores: torch.Tensor) -> torch.Tensor:
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.to(scores).reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Kept:
    """How a value is rounded on its way through the KV cache: to the nearest, or ``toward_zero``."""

    dtype: torch.dtype
    scale: float = 1.0
    toward_zero: bool = False

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        value = value.float() / self.scale
        if self.dtype.itemsize > 1:
            return value.to(self.dtype).float() * self.scale
        largest = torch.finfo(self.dtype).max  # the cache saturates, where torch gives NaN or infinity
        value = value.clamp(-largest, largest)
        rounded = value.to(self.dtype)
        if self.toward_zero:
            bits = rounded.view(torch.uint8)
            rounded = (bits - (rounded.float().abs() > value.abs()).to(torch.uint8)).view(self.dtype)
        return rounded.float() * self.scale


def _as_kept(value: torch.Tensor, kept: Kept | None) -> torch.Tensor:
    return value.float() if kept is None else kept(value)


def kernel_of(module: Any, what: str) -> Kernel:
    """Raises ``LocationError`` for a module whose kernel does more with scores than is known here."""
    require_heads(module, what)
    impl, kind = module.impl, type(module).__name__
    for known, its in ((kind == "Attention", kind), (type(impl).__name__ in _KERNELS, type(impl).__name__)):
        if not known:
            raise _unknown(what, f"{its} computes its weights")
    for name in ("use_alibi_sqrt", "mm_prefix_clamp_sliding_window", "use_mm_prefix", "calculate_kv_scales"):
        if getattr(impl, name, False) or getattr(module, name, False):
            raise _unknown(what, f"{kind} attends with {name}")
    if getattr(module, "attn_type", "decoder") != "decoder" or getattr(impl, "chunk_lookback", -1) > -1:
        raise _unknown(what, f"{kind} attends, which is not causally, token by token")
    slopes, cap = getattr(impl, "alibi_slopes", None), getattr(impl, "logits_soft_cap", None) or 0.0
    if slopes is not None and cap:
        raise _unknown(what, f"{kind} caps scores that have ALiBi's slopes in them")
    kept = _kept(module, what)
    queries_kept = kept if getattr(module, "query_quant", None) is not None else None
    if kept is not None and kept.dtype.itemsize == 1:
        truncates = type(impl).__name__ == "CPUAttentionBackendImpl"  # seen in what it computes
        kept = Kept(kept.dtype, _scale(module, "_k_scale", what), truncates)
        queries_kept = queries_kept and Kept(kept.dtype, _scale(module, "_q_scale", what))
    sinks = getattr(impl, "sinks", None)
    return Kernel(float(impl.scale), _window(impl.sliding_window), cap, slopes, sinks, kept, queries_kept)


def _window(kept: Any) -> int | None:
    """A number of keys, none if it is None or below 1, or in other backends (how many to the left, to the right)."""
    size = kept[0] + 1 if isinstance(kept, tuple) else kept or 0
    return size if size > 0 else None


def _kept(module: Any, what: str) -> Kept | None:
    kind = str(getattr(module, "kv_cache_dtype", "auto"))
    if kind in _EIGHT_BITS:
        return Kept(_EIGHT_BITS[kind])
    if kind not in ("auto", "bfloat16", "float16", "float32"):
        raise _unknown(what, f"keys are rounded in a KV cache of {kind}")
    dtype = getattr(module, "kv_cache_torch_dtype", None)
    return None if dtype in (None, torch.float32) else Kept(dtype)


def _scale(module: Any, name: str, what: str) -> float:
    scale = getattr(module, name)
    if scale.numel() != 1:
        raise _unknown(what, "a KV cache of 8 bits with a scale for each head rounds keys")
    return float(scale)


def _unknown(what: str, how: str) -> LocationError:
    return LocationError(f"{what} is not known here: insitu does not know how {how}. Read model.q, model.k and model.v")
