"""Where the source text of running code may be found, as parsed trees."""

from __future__ import annotations
import __future__

import ast
import linecache
import os
import stat
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from insitu.block.syntax import syntax_tree

__all__ = ["Source", "compile_quietly", "compiled", "future_flags", "register", "sources"]

_CALLERS_ASKED = 20

_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


class Source(NamedTuple):
    """A parsed text that code may have come from."""

    tree: ast.Module
    certain: bool = False
    """Known to be what the code was compiled from."""
    rewritten: bool = False
    """The code may have been compiled from a changed tree of this text, on the same lines."""


def sources(frame: FrameType) -> Iterator[Source]:
    """Texts that the code of `frame` may have come from, likeliest first."""
    code = frame.f_code
    registered = _registered.get(id(code))
    if registered is not None and registered.code() is code:
        yield Source(registered.tree, certain=True)
        return
    text = "".join(_lines(frame))
    if text.strip():
        tree = _parse(text, code.co_filename)
        if tree is not None:
            yield Source(tree, rewritten=_may_be_rewritten(frame))
    for text, rewritten in _texts_elsewhere(frame):
        tree = _parse(text, code.co_filename)
        if tree is not None:
            yield Source(tree, rewritten=rewritten)


def future_flags(code: CodeType) -> int:
    """Compiler flags of the `from __future__` imports that `code` was compiled under."""
    return code.co_flags & _FUTURE


def compile_quietly(tree: ast.Module, filename: str, flags: int = 0) -> CodeType:
    """Compile without repeating the warnings that Python already gave for this source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(tree, filename, "exec", flags, dont_inherit=True)


def compiled(tree: ast.Module, filename: str, flags: int) -> CodeType | None:
    """What a tree found by `sources` compiles to, if it does; done once."""
    known = _compiled.get(tree)
    if known is None or known[0] != flags:
        try:
            known = (flags, compile_quietly(tree, filename, flags))
        except (SyntaxError, ValueError, RecursionError):
            known = (flags, None)
        _compiled[tree] = known
    return known[1]


_compiled: weakref.WeakKeyDictionary[ast.Module, tuple[int, CodeType | None]] = weakref.WeakKeyDictionary()


# Code that was compiled here, which has no file of its own.


class _Registered(NamedTuple):
    code: weakref.ref[CodeType]
    tree: ast.Module


_registered: dict[int, _Registered] = {}


def register(code: CodeType, tree: ast.Module) -> None:
    """Let a `with` in `code`, or in a function defined by it, be found in `tree` instead of in a file."""
    key = id(code)
    _registered[key] = _Registered(weakref.ref(code, lambda _, registered=_registered: registered.pop(key, None)), tree)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            register(constant, tree)


# Text.


def _lines(frame: FrameType) -> list[str]:
    code = frame.f_code
    linecache.checkcache(code.co_filename)
    lines_of_code = getattr(linecache, "_getlines_from_code", None)  # 3.13: interpreter and `-c`
    if lines_of_code is not None:
        lines = lines_of_code(code)
        if lines:
            return lines
    return linecache.getlines(code.co_filename, frame.f_globals)


def _texts_elsewhere(frame: FrameType) -> Iterator[tuple[str, bool]]:
    """Texts that may be those of code without a file, and whether the code may be of a changed tree."""
    filename = frame.f_code.co_filename
    if filename == "<string>":
        yield from ((text, False) for text in _command_line_text())
    if filename in ("<stdin>", "-"):
        yield from ((text, False) for text in _standard_input_text())
    if not os.path.isfile(filename):
        yield from _texts_of_callers(frame)


def _command_line_text() -> Iterator[str]:
    arguments = sys.orig_argv
    for position, argument in enumerate(arguments[:-1]):
        if argument.startswith("-") and not argument.startswith("--") and argument.endswith("c"):
            yield arguments[position + 1]
            return


def _standard_input_text() -> Iterator[str]:
    try:
        descriptor = sys.__stdin__.fileno()  # type: ignore[union-attr]
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            yield os.pread(descriptor, status.st_size, 0).decode()
    except (AttributeError, OSError, ValueError):
        return


def _texts_of_callers(frame: FrameType) -> Iterator[tuple[str, bool]]:
    """Strings that the callers hold: one of them may be what was given to `exec`, or to `%%time`."""
    caller = frame.f_back
    for _ in range(_CALLERS_ASKED):
        if caller is None:
            return
        for value in (*caller.f_locals.values(), *caller.f_code.co_consts):
            if isinstance(value, str) and "with" in value and ":" in value:
                yield value, caller.f_globals.get("__name__", "").startswith("IPython.")
        caller = caller.f_back


# Trees.

_parsed: OrderedDict[tuple[str, str], ast.Module] = OrderedDict()


def _parse(text: str, filename: str) -> ast.Module | None:
    key = (filename, text)
    if key not in _parsed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _parsed[key] = syntax_tree(text, filename, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        while len(_parsed) > 8:
            _parsed.popitem(last=False)
    _parsed.move_to_end(key)
    return _parsed[key]


def _may_be_rewritten(frame: FrameType) -> bool:
    """Whether something between file and code may have changed the tree, as pytest and IPython do."""
    if not os.path.isfile(frame.f_code.co_filename):
        return True
    loader = frame.f_globals.get("__loader__")
    kind = type(loader)
    plain = kind.__module__ in ("_frozen_importlib_external", "importlib.machinery", "builtins")
    return loader is not None and not plain
