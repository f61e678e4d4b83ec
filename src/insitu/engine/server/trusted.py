"""Blocks of clients that the operator trusts with any code: neither checked nor limited, and not unpickled either."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from insitu.block import Block
from insitu.guard.compiled import as_definition
from insitu.net import CodeSource, Device, Dtype, FunctionRef, Member, ModuleRef, Named, Ref, TraceRequest, WireError
from insitu.net.limits import WireLimits
from insitu.net.sources import remote_name


@dataclass(frozen=True)
class TrustedInvoke:
    """One invoke of a request, ready to become a job."""

    prompt: Any
    sampling: dict[str, Any]
    block: Block | FunctionType
    values: dict[str, Any]
    shared: tuple[str, ...]


def trusted(request: TraceRequest, named: Callable[[Named], Any], wire: WireLimits) -> list[TrustedInvoke]:
    """The invokes of a request. ``named`` gives the server's own model, nodes and tracer. Raises ``WireError``."""
    functions = [_function(one.code) for one in request.functions]

    def resolve(ref: Ref) -> Any:
        if isinstance(ref, FunctionRef):
            if ref.number >= len(functions):
                raise WireError("a value names a function that has not come")
            return functions[ref.number]
        return named(ref) if isinstance(ref, Named) else _resolved(ref)

    decoded = request.decoded(resolve, wire)
    for function, values in zip(functions, decoded.functions, strict=True):
        function.__globals__.update(values.names)
        function.__defaults__, function.__kwdefaults__ = values.defaults, values.kwdefaults
    made = []
    for one, values in zip(request.invokes, decoded.invokes, strict=True):
        block = functions[one.function or 0] if one.block is None else one.block.block()
        made.append(TrustedInvoke(values.prompt, values.sampling, block, values.values, tuple(one.shared)))
    return made


def _function(source: CodeSource) -> FunctionType:
    """The function of a text; the names that it uses come later."""
    tree = source.tree()
    name = as_definition(tree)
    if isinstance(statement := tree.body[0], ast.FunctionDef):
        statement.decorator_list = []
    space: dict[str, Any] = {"__name__": "<client>"}
    exec(compile(ast.fix_missing_locations(tree), remote_name(source.filename), "exec"), space)
    return space[name]


def _resolved(ref: Ref) -> Any:
    match ref:
        case ModuleRef(name):
            return importlib.import_module(name)
        case Member(module, name):
            return getattr(importlib.import_module(module), name)
        case Dtype(name):
            return getattr(torch, name)
        case Device(name):
            return torch.device(name)
    raise WireError("a value is of no kind that is known here", "unknown")
