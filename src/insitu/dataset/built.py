"""The engine that a capture builds for itself: with taps at the places that it reads, where they can have some."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from insitu.block import InsituError, UnknownModuleError
from insitu.dataset.reading import LOGITS
from insitu.engine.client.model import VLLM

_TAPPED = re.compile(r"(model\.)?(embed|final_norm|resid_(pre|mid|post)|attn_out|mlp_out)(\[.*\])?|.+\.(input|output)")
_BESIDE = ("taps", "enforce_eager", "compilation_config", "additional_config")


def model_for(repo: str, at: str | Sequence[str], engine_args: Mapping[str, Any]) -> VLLM:
    """A model whose engine is built. With taps at ``at`` its compiled forward serves these places itself, where
    an engine without them has to run eagerly; the values are the same within rounding.

    Without them if a tap can't serve one of the places, since steps are eager then in any case.
    """
    if taps := taps_for(at, engine_args):
        try:
            return VLLM(repo, dispatch=True, taps=taps, **engine_args)
        except UnknownModuleError:
            raise
        except InsituError:
            pass  # a place that can't be read either is refused where it is read
    return VLLM(repo, dispatch=True, **engine_args)


def taps_for(at: str | Sequence[str], engine_args: Mapping[str, Any]) -> list[str]:
    """Those that an engine may have for its captures; none where one place needs an eager step, where nothing is
    compiled, and beside arguments that have their own say."""
    names = [name for name in ([at] if isinstance(at, str) else at) if name != LOGITS]
    if any(engine_args.get(name) for name in _BESIDE) or (engine_args.get("pipeline_parallel_size") or 1) > 1:
        return []
    return names if all(_TAPPED.fullmatch(name) for name in names) else []
