"""The caller's variables: read before a block runs, bound after it."""

from __future__ import annotations

import ctypes
import dis
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from . import containers
from .errors import SourceError

__all__ = ["Scope"]

_FUNCTION = 0x1  # CO_OPTIMIZED: locals live in the frame and not in a dict
_WRITES_THROUGH = sys.version_info >= (3, 13)  # PEP 667


class _Variables(NamedTuple):
    """Which names of a piece of code are its own variables and which it takes for globals."""

    local: frozenset[str]
    free: frozenset[str]
    globals_used: frozenset[str]
    globals_stored: frozenset[str]


class Scope:
    """The variables that code in `frame` sees. Holds the frame: don't keep it longer than the trace."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._code = frame.f_code

    @property
    def module_name(self) -> str:
        """`__name__` of the module that the frame's code belongs to."""
        return self._frame.f_globals.get("__name__", "__main__")

    @property
    def qualname(self) -> str:
        """Qualified name of the frame's function, as far as this Python knows it."""
        return getattr(self._code, "co_qualname", self._code.co_name)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """What each of `names` has here. One that has no value, or is only a builtin, is left out."""
        local, module = self._frame.f_locals, self._frame.f_globals
        own = _own_names(self._code)
        found: dict[str, Any] = {}
        for name in names:
            if name in local:
                found[name] = local[name]
            elif name in own:
                found.update(self._from_enclosing_function(name))
            elif name in module:
                found[name] = module[name]
        return found

    def bind(self, mapping: Mapping[str, Any]) -> None:
        """Give names values, as assignments in the frame's own code would. No other name is touched."""
        if not mapping:
            return
        local, module = self._split(mapping)
        self._frame.f_globals.update(module)
        if not local:
            return
        # Before 3.13, `f_locals` of a function is a snapshot that has to be written back.
        snapshot = self._frame.f_locals
        for name, value in local.items():
            snapshot[name] = value
        if self._code.co_flags & _FUNCTION and not _WRITES_THROUGH:
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self._frame), ctypes.c_int(0))

    def copied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` as a block may have them: lists, dicts and sets copied, all else the same objects."""
        return containers.copied(values)

    def _split(self, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        variables = _variables(self._code)
        local: dict[str, Any] = {}
        module: dict[str, Any] = {}
        is_function = self._code.co_flags & _FUNCTION
        for name, value in mapping.items():
            if name in variables.globals_stored:
                module[name] = value
            elif (not is_function and name not in variables.free) or (
                is_function and (name in variables.local or name in variables.free)
            ):
                local[name] = value
            elif is_function and name in self._code.co_names:
                module[name] = value
            else:
                raise SourceError(f"`{name}` is no variable of {self.qualname}, so that it can't be bound there")
        return local, module

    def _from_enclosing_function(self, name: str) -> dict[str, Any]:
        """A variable that a class body has from the function around it, which is the frame that runs it."""
        frame = self._frame
        while not frame.f_code.co_flags & _FUNCTION and name in frame.f_code.co_freevars:
            if frame.f_back is None:
                return {}
            frame = frame.f_back
            if name in frame.f_locals:
                return {name: frame.f_locals[name]}
        return {}


def _own_names(code: CodeType) -> frozenset[str]:
    """Names that are never looked up among the globals.

    Those of a comprehension compiled into its function are listed with the function's own, though the
    function itself may mean a global by the same name.
    """
    variables = _variables(code)
    local = variables.local if code.co_flags & _FUNCTION else frozenset()
    return (local | variables.free) - variables.globals_used


_CACHE: dict[CodeType, _Variables] = {}


def _variables(code: CodeType) -> _Variables:
    if code not in _CACHE:
        if len(_CACHE) >= 512:
            _CACHE.clear()
        operations = [(op.opname, op.argval) for op in dis.get_instructions(code)]
        _CACHE[code] = _Variables(
            local=frozenset(code.co_varnames + code.co_cellvars),
            free=frozenset(code.co_freevars),
            globals_used=frozenset(name for op, name in operations if op.endswith("_GLOBAL")),
            globals_stored=frozenset(name for op, name in operations if op in ("STORE_GLOBAL", "DELETE_GLOBAL")),
        )
    return _CACHE[code]
