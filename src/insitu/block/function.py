"""The function form: a function of the tracer, run as a block is."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from .errors import ArgumentError

__all__ = ["FunctionBlock"]


class FunctionBlock:
    """A function that is called with the tracer, where the model runs; what it returns comes home."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        if not callable(fn):
            raise ArgumentError(f"a function of the tracer is wanted, not {type(fn).__name__}")
        self.fn = fn
        code = _code_of(fn)
        self.filename: str = code.co_filename if code else "<unknown>"
        self.lineno: int = code.co_firstlineno if code else 0
        self.qualname: str = getattr(fn, "__qualname__", type(fn).__qualname__)
        parts = (_fingerprint(code) if code else self.qualname, self.filename, sys.version_info[:2])
        self.digest: str = hashlib.sha256(repr(parts).encode()).hexdigest()
        """Of its code; what it closes over is not in it."""

    def run(self, tracer: Any) -> Any:
        """Call it."""
        return self.fn(tracer)


def _code_of(fn: Any) -> CodeType | None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(vars(type(fn)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _fingerprint(code: CodeType) -> tuple[Any, ...]:
    constants = [_fingerprint(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_firstlineno, constants)
