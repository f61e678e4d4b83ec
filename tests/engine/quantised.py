"""Tiny checkpoints with quantised weights, in the formats that vLLM's CPU build runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from tests import models

GROUP = 32
Tensors = dict[str, torch.Tensor]


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantised = (weight / scale).round()
    return {"weight": quantised.to(torch.int8), "weight_scale": scale}, quantised * scale


def _four_bits(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    grouped = weight.view(len(weight), -1, GROUP)
    scale = (grouped.abs().amax(2, keepdim=True) / 7).bfloat16().float()
    quantised = (grouped / scale).round().clamp(-8, 7)
    packed = pack_to_int32(quantised.view_as(weight).to(torch.int8), 4)
    stored = {"weight_packed": packed, "weight_scale": scale[..., 0].contiguous()}
    return {**stored, "weight_shape": torch.tensor(weight.shape)}, (quantised * scale).view_as(weight)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    grouped = weight.view(len(weight), -1, GROUP)
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    scale = ((high - low) / 15).half().bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    quantised = (grouped / scale + zero).round().clamp(0, 15)
    stored = {
        "qweight": _eight_in_one(quantised.view_as(weight).T),
        "qzeros": _eight_in_one(zero[..., 0].T),
        "scales": scale[..., 0].T.half().contiguous(),
    }
    return stored, ((quantised - zero) * scale).view_as(weight)


def _eight_in_one(values: torch.Tensor) -> torch.Tensor:
    """Eight values of four bits in each int32, in AWQ's order."""
    ordered = values.long().reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    packed = sum(ordered[..., i] << 4 * i for i in range(8))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.uint32).view(torch.int32).contiguous()


def _compressed(form: str, bits: int, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **others.pop("weights")}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **others}}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**common, "format": form, "config_groups": groups}


_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
_KINDS: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "int8": (_int8, _compressed("int-quantized", 8, weights={"strategy": "channel"}, input_activations=_BY_TOKEN)),
    "four bits": (_four_bits, _compressed("pack-quantized", 4, weights={"strategy": "group", "group_size": GROUP})),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["lm_head"]},
    ),
}


def quantised(kind: str, folder: Path) -> Tensors:
    """Writes the tiny Llama with quantised linear layers to `folder`; returns the weights that they stand for."""
    quantise, settings = _KINDS[kind]
    source = Path(models.tiny("llama"))
    shutil.copytree(source, folder, dirs_exist_ok=True)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            path = name.removesuffix(".weight")
            parts, meant[path] = quantise(weight)
            stored |= {f"{path}.{part}": tensor for part, tensor in parts.items()}
        else:
            stored[name] = weight
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return meant
