"""Experts in float32, or of other than bfloat16, on a CPU with AMX."""

from __future__ import annotations

from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from vllm.platforms import current_platform


def let_experts_be_float32() -> None:
    """There vLLM runs experts in bfloat16 alone, and refuses others as if their sizes were odd. Its kernel for CPUs
    without AMX runs them on those with it too."""
    if not current_platform.is_cpu() or not torch.cpu._is_amx_tile_supported():
        return
    try:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
    except ImportError:
        return
    original = CPUFusedMOE.check_grouped_gemm
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def check(self: Any, layer: Any) -> tuple[bool, str]:
        if layer.w13_weight.dtype == torch.bfloat16:
            return original(self, layer)
        with patch.object(torch.cpu, "_is_amx_tile_supported", return_value=False):
            return original(self, layer)

    CPUFusedMOE.check_grouped_gemm = check
