"""Values weighted by the pattern are what CUDA's kernels return: `pytest -m gpu tests/gpu/test_heads.py`.

In bfloat16, whose rounding of weights and of what is returned is the bound.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

CASES = [
    ("llama", {}),
    ("llama", {"attention_backend": "TRITON_ATTN"}),
    ("llama", {"kv_cache_dtype": "fp8"}),
    ("llama", {"kv_cache_dtype": "fp8", "attention_backend": "TRITON_ATTN"}),
    ("mistral", {}),
    ("mistral", {"attention_backend": "TRITON_ATTN"}),
    ("gemma2", {}),
    ("bloom", {"attention_backend": "TRITON_ATTN"}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_pattern_times_values_is_what_attention_returns(name: str, settings: dict[str, Any]) -> None:
    import insitu
    from tests.architectures.tiny import tiny

    arguments = {"dtype": "bfloat16", "max_model_len": 128, "gpu_memory_utilization": 0.1, "enforce_eager": True}
    arguments |= {"kv_cache_memory_bytes": 2**28}
    prompt = torch.randint(5, 400, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with insitu.VLLM(tiny(name), dispatch=True, skip_tokenizer_init=True, **arguments, **settings) as model:
        outline = model._running().outline
        at = next(path for path, module in outline.modules.items() if module.kind == "Attention" and ".1." in path)

        def block(tracer: Any) -> list[tuple[torch.Tensor, ...]]:
            return [(model.attn_pattern[1], model.v[1], model.get(at).output) for _ in tracer.iter[:]]

        several = model.run(
            block, [prompt, prompt[:5]], temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False
        )
    eight_bits = "kv_cache_dtype" in settings
    for seen in several:
        v = torch.cat([each[1] for each in seen]).float()
        v = v.to(torch.float8_e4m3fn).float() if eight_bits else v
        for pattern, _, returned in seen:
            values = v[: pattern.shape[-1]].repeat_interleave(len(pattern) // v.shape[1], 1)
            computed = torch.einsum("hqk,khd->qhd", pattern, values).flatten(1)
            apart = ((computed - returned.float()).norm() / returned.float().norm()).item()
            print(f"{name} {settings} {tuple(pattern.shape)}: {apart:.1e}")
            assert apart < (0.02 if eight_bits else 0.01)
