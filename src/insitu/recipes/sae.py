"""Sparse autoencoders: read, ablate and steer a model by their features.

Cunningham et al., "Sparse autoencoders find highly interpretable features in language models", 2023; JumpReLU,
Rajamanoharan et al., 2024. The names of the tensors are those that SAELens writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM
from insitu.engine.client.view import view_of
from insitu.recipes.prompts import listed, waiting


@dataclass(frozen=True)
class SparseAutoencoder:
    """``encode``: rows ``[rows, width]`` to features ``[rows, features]``, none negative; ``decode``: back.

    ``threshold`` ``[features]``, if there is one, makes it a JumpReLU. ``centred``: ``b_dec`` is taken from the rows
    first.
    """

    w_enc: torch.Tensor
    b_enc: torch.Tensor
    w_dec: torch.Tensor
    b_dec: torch.Tensor
    threshold: torch.Tensor | None = None
    centred: bool = True

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, centred: bool = True) -> SparseAutoencoder:
        """From a safetensors file with ``W_enc [width, features]``, ``b_enc``, ``W_dec [features, width]``, ``b_dec``
        and perhaps ``threshold``. Raises ``ArgumentError`` if a tensor is missing or of another shape."""
        from safetensors.torch import load_file

        tensors = load_file(os.fspath(path))
        missing = [name for name in ("W_enc", "b_enc", "W_dec", "b_dec") if name not in tensors]
        if missing:
            raise ArgumentError(f"{path} has no {missing[0]}; it has {', '.join(sorted(tensors))}")
        width, features = tensors["W_enc"].shape
        shapes = {"b_enc": (features,), "W_dec": (features, width), "b_dec": (width,), "threshold": (features,)}
        for name, shape in shapes.items():
            if name in tensors and tuple(tensors[name].shape) != shape:
                raise ArgumentError(f"{path}: {name} is {tuple(tensors[name].shape)}, and W_enc wants {shape}")
        names = ("W_enc", "b_enc", "W_dec", "b_dec")
        return cls(*(tensors[name].float() for name in names), threshold=tensors.get("threshold"), centred=centred)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.float()
        centre = self.b_dec.to(rows.device) if self.centred else 0
        before = (rows - centre) @ self.w_enc.to(rows.device) + self.b_enc.to(rows.device)
        active = before.relu()
        return active if self.threshold is None else active * (before > self.threshold.to(rows.device))

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.w_dec.to(features.device) + self.b_dec.to(features.device)

    def without(self, rows: torch.Tensor, features: Sequence[int]) -> torch.Tensor:
        """The rows less what these features add to them; what the autoencoder does not explain stays."""
        chosen = list(features)
        part = self.encode(rows)[:, chosen] @ self.w_dec[chosen].to(rows.device)
        return rows - part.to(rows.dtype)


def features(model: VLLM, prompt: Any, sae: SparseAutoencoder, *, at: str) -> torch.Tensor:
    """The features of each token of the prompt, ``[tokens, features]``, computed in the engine."""
    place = view_of(waiting(model)).one(at)

    def read(tracer: Any) -> torch.Tensor:
        return sae.encode(place.read(model))

    return model.run(read, prompt, max_tokens=1)


def ablate_features(
    model: VLLM, prompts: Sequence[Any], sae: SparseAutoencoder, chosen: Sequence[int], *, at: str, **sampling: Any
) -> list[str]:
    """What the model writes without these features, prompt and generated tokens alike."""
    place = view_of(waiting(model)).one(at)

    def without(tracer: Any) -> str:
        for _ in tracer.iter[:]:
            rows = place.read(model)
            rows[:] = sae.without(rows, chosen)
        return tracer.result.outputs[0].text

    return model.run(without, listed(prompts), **sampling)


def steer_feature(
    model: VLLM, prompts: Sequence[Any], sae: SparseAutoencoder, feature: int, scale: float, *, at: str, **sampling: Any
) -> list[str]:
    """What the model writes with ``scale`` times one feature's direction added at every token."""
    from insitu.recipes.steering import Steering

    return Steering(model, sae.w_dec[feature], at, scale=scale).generate(prompts, **sampling)
