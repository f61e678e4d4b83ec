"""What stands in a block's text, where only that can tell what the block may come to do."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = {"torch", "numpy", "vllm", "transformers", "insitu", "builtins"}
_DEPTH = 4
_GUARD = "_getattr_"

# By these a tensor is changed without its version counter taking note.
BEHIND_TORCH = {"data", "numpy", "asarray", "array", "frombuffer", "from_dlpack", "memoryview", "ctypes", "data_ptr"}
BEHIND_TORCH |= {"storage", "untyped_storage", "set_"}
# These take values without asking for them, or can't wait for them.
UNASKED = {"tensor", "as_tensor", "as_subclass", "Tensor", "FloatTensor", "HalfTensor", "BFloat16Tensor", "to_dlpack"}
UNASKED |= {"ops", "library", "custom_op", "jit", "_C", "_make_subclass"}

Text = tuple[CodeType, Mapping[str, Any]] | Callable[..., Any]
"""Code and what the names in it mean, or a function."""


def mentions(text: Text) -> frozenset[str]:
    """Every name and attribute in a text, and in that of the user's functions that it calls."""
    if isinstance(text, tuple):
        code, names = text
        return frozenset(_mentioned(code, names, _DEPTH))
    function = _function(text)
    if not isinstance(function, FunctionType):
        return frozenset()
    return frozenset(_mentioned(function.__code__, _names_of(function), _DEPTH))


def code_of(program: Callable[[], Any], text: Text) -> object:
    """Stands for a program's text, whatever values it runs with."""
    if isinstance(text, tuple):
        return text[0]
    return getattr(_function(text), "__code__", program)


def text_of(program: Callable[[], Any]) -> Text:
    """What it runs, which a program that is an object says with ``text()``."""
    text: Any = getattr(program, "text", lambda: program)()
    return text.text() if hasattr(type(text), "guarded") else text


def _function(text: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(text, partial):
        text = text.func
    return inspect.unwrap(getattr(text, "__func__", text))


def _mentioned(code: CodeType, names: Mapping[str, Any], depth: int) -> set[str]:
    used = set(_used(code))
    for helper, its_names in list(_helpers(used, names)) if depth else ():
        used |= _mentioned(helper, its_names, depth - 1)
    return used


@lru_cache(maxsize=1024)
def _used(code: CodeType) -> frozenset[str]:
    inner = (_used(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    # Where attributes go through a guard, their names are texts.
    guarded = [each for each in code.co_consts if isinstance(each, str)] if _GUARD in code.co_names else []
    return frozenset((*code.co_names, *code.co_freevars, *guarded)).union(*inner)


def _helpers(used: set[str], names: Mapping[str, Any]) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    found = [names[name] for name in used if name in names]
    modules = [value for value in found if isinstance(value, ModuleType)]
    found += [vars(module).get(name) for module in modules for name in used]
    value: Any
    for value in found:
        if isinstance(value, FunctionType):
            if value.__module__.split(".")[0] not in _LIBRARIES:
                yield value.__code__, _names_of(value)
        elif hasattr(type(value), "guarded"):
            yield value.text()


def _names_of(function: FunctionType) -> Mapping[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed: dict[str, Any] = {}
    for name, cell in cells:
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return ChainMap(closed, function.__globals__)
