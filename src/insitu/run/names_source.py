"""Whether a block may come to ask for operations in a forward that has begun already."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = {"torch", "numpy", "vllm", "transformers", "insitu", "builtins"}
_DEPTH = 4


Text = tuple[CodeType, Mapping[str, Any]] | Callable[..., Any]
"""Code and what the names in it mean, or a function."""


def names_source(program: Callable[[], Any]) -> bool:
    """Whether ``.source`` stands in the program, or in a helper function that it calls.

    A program that is an object says with ``text()`` what it runs.
    """
    text: Text = getattr(program, "text", lambda: program)()
    if isinstance(text, tuple):
        code, names = text
        return _named_in(code, names, _DEPTH)
    while isinstance(text, partial):
        text = text.func
    function = inspect.unwrap(getattr(text, "__func__", text))
    return isinstance(function, FunctionType) and _named_in(function.__code__, _names_of(function), _DEPTH)


def _named_in(code: CodeType, names: Mapping[str, Any], depth: int) -> bool:
    used = set(_used(code))
    if "source" in used:
        return True
    helpers = _helpers(used, names) if depth else ()
    return any(_named_in(each.__code__, _names_of(each), depth - 1) for each in helpers)


def _used(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used(constant)


def _helpers(used: set[str], names: Mapping[str, Any]) -> Iterator[FunctionType]:
    found = [names[name] for name in used if name in names]
    modules = [value for value in found if isinstance(value, ModuleType)]
    found += [vars(module).get(name) for module in modules for name in used]
    for value in found:
        if isinstance(value, FunctionType) and value.__module__.split(".")[0] not in _LIBRARIES:
            yield value


def _names_of(function: FunctionType) -> Mapping[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed: dict[str, Any] = {}
    for name, cell in cells:
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return ChainMap(closed, function.__globals__)
