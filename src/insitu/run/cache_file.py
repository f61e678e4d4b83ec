"""Recorded values as one safetensors file: the tensors by name, and how they fit together as metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from insitu.block import ArgumentError

_KEY = "insitu.cache"
_VERSION = 1

Values = Mapping[str, tuple[int, Any]]


def save_values(file: str | os.PathLike[str], values: Values, lists: Mapping[str, int]) -> None:
    """Writes ``(step, value)`` by name. A value is tensors and plain data in tuples, lists and dicts."""
    tensors: dict[str, torch.Tensor] = {}
    records = [[name, step, _taken_apart(value, name, tensors)] for name, (step, value) in values.items()]
    header = {"version": _VERSION, "records": records, "lists": dict(lists)}
    save_file(tensors, os.fspath(file), metadata={_KEY: json.dumps(header)})


def load_values(file: str | os.PathLike[str]) -> tuple[dict[str, tuple[int, Any]], dict[str, int]]:
    """What ``save_values`` was given."""
    try:
        with safe_open(os.fspath(file), framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get(_KEY, "null"))
            if not header or header["version"] != _VERSION:
                raise ArgumentError(f"`{os.fspath(file)}` was not written by Cache.save_safetensors of this version")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ArgumentError(f"`{os.fspath(file)}` is no safetensors file: {error}") from error
    return {name: (step, _put_together(form, tensors)) for name, step, form in header["records"]}, header["lists"]


def _taken_apart(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The form of ``value`` in JSON; its tensors are put under names that begin with ``name``."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().contiguous()
        return {"tensor": name}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_taken_apart(part, f"{name}/{i}", tensors) for i, part in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[key, _taken_apart(part, f"{name}/{key}", tensors)] for key, part in value.items()]}
    return {"data": value}


def _put_together(form: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_put_together(part, tensors) for part in content)
    if kind == "list":
        return [_put_together(part, tensors) for part in content]
    if kind == "dict":
        return {key: _put_together(part, tensors) for key, part in content}
    return content
