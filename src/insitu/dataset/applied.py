"""Functions that are applied to rows before they are kept, by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from insitu.block import ArgumentError


def function_of(given: Any) -> Any:
    """``"mean"``: the mean over the kept rows. ``"project:FILE"``: rows times the transpose of the only
    tensor ``[k, width]`` in a safetensors file. ``"FILE.py:NAME"``: a function of that file. Or a function.

    Each is given the kept rows of one place ``[rows, width]`` and returns ``[any, any]``, or one row.
    """
    if given is None or callable(given):
        return given
    if given == "mean":
        return _mean
    kind, _, rest = str(given).partition(":")
    if kind == "project" and rest:
        return _Project(Path(rest))
    if kind.endswith(".py") and rest:
        return _from_file(Path(kind), rest)
    raise ArgumentError(
        f"apply={given!r}: it is a function, 'mean', 'project:FILE.safetensors' or 'FILE.py:NAME', a function there"
    )


def _mean(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().mean(0, keepdim=True).to(rows.dtype)


class _Project:
    def __init__(self, file: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(str(file))
        if len(tensors) != 1 or next(iter(tensors.values())).dim() != 2:
            raise ArgumentError(f"apply: {file} is to hold one tensor [k, width]; it has {sorted(tensors)}")
        self._directions = next(iter(tensors.values()))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._directions.to(rows.device, rows.dtype).T


def _from_file(file: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise ArgumentError(f"apply: there is no {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise ArgumentError(f"apply: {file} has no function `{name}`")
    return found
