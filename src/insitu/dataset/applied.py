"""Functions that are applied to rows before they are kept, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from insitu.block import ArgumentError
from insitu.from_file import function_in


def function_of(given: Any) -> Any:
    """``"mean"``: the mean over the kept rows. ``"project:FILE"``: rows times the transpose of the only
    tensor ``[k, width]`` in a safetensors file. ``"sae:FILE"``: the features ``[rows, features]`` of a sparse
    autoencoder, in float32 (``recipes.SparseAutoencoder.load``). ``"FILE.py:NAME"``: a function of that file. Or a
    function.

    Each is given the kept rows of one place ``[rows, width]`` and returns ``[any, any]``, or one row. Those that make
    one row of each say so with an attribute ``by_row``, which is true.
    """
    if given is None or callable(given):
        return given
    if given == "mean":
        return _mean
    kind, _, rest = str(given).partition(":")
    if kind == "project" and rest:
        return _Project(Path(rest))
    if kind == "sae" and rest:
        return _Features(Path(rest))
    if kind.endswith(".py") and rest:
        return function_in(str(given), "apply")
    raise ArgumentError(
        f"apply={given!r}: it is a function, 'mean', 'project:FILE.safetensors', 'sae:FILE.safetensors' or "
        f"'FILE.py:NAME', a function there"
    )


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().mean(0, keepdim=True).to(rows.dtype)


class _Project:
    by_row = True

    def __init__(self, file: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(str(file))
        if len(tensors) != 1 or next(iter(tensors.values())).dim() != 2:
            raise ArgumentError(f"apply: {file} is to hold one tensor [k, width]; it has {sorted(tensors)}")
        self._directions = next(iter(tensors.values()))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._directions.to(rows.device, rows.dtype).T


class _Features:
    by_row = True

    def __init__(self, file: Path) -> None:
        from insitu.recipes.sae import SparseAutoencoder

        self._autoencoder = SparseAutoencoder.load(file)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._autoencoder.encode(rows)
