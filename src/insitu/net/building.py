"""A trace of the caller's made into a request: values, and functions as source."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from insitu.block import ArgumentError, Block
from insitu.block.syntax import syntax_tree
from insitu.net.refs import Named
from insitu.net.requests import FunctionSource, InvokeRequest, TraceRequest
from insitu.net.sources import CodeSource, block_source
from insitu.net.values import Encoder

__all__ = ["TraceBuilder"]


class TraceBuilder:
    """Takes the invokes of one trace, in order; ``request`` is then what is sent.

    ``name_of`` says what an object of the client's stands for at the server (its model, nodes and tracer), or None.
    Raises ``ArgumentError``, naming the variable, for a value or function that can't travel.
    """

    def __init__(self, name_of: Callable[[Any], Named | None] | None = None) -> None:
        self._encoder = Encoder(name_of, self._number)
        self._functions: dict[FunctionType, int] = {}
        self._texts: list[tuple[FunctionType, str]] = []
        self._invokes: list[InvokeRequest] = []

    def add(
        self,
        prompt: Any,
        block: Block | Callable[[Any], Any] | None,
        values: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        """One invoke. ``block``: what was captured, or the function form's function; None for a prompt alone."""
        encode = self._encoder.encode
        given = encode(prompt, "the prompt")
        settings = {name: encode(value, f"`{name}=`") for name, value in (sampling or {}).items()}
        found = {name: encode(value, f"`{name}`") for name, value in (values or {}).items()}
        if block is None:
            self._invokes.append(InvokeRequest(given, None, {}, settings))
            return
        if isinstance(block, Block):
            self._invokes.append(InvokeRequest(given, block_source(block), found, settings, None, tuple(shared)))
            return
        if not isinstance(block, FunctionType):
            raise ArgumentError(
                f"the block is a {type(block).__name__}; a function travels, as source: write one with def"
            )
        number = self._number(block, f"`{block.__name__}`")
        self._invokes.append(InvokeRequest(given, None, found, settings, number, tuple(shared)))

    def request(self, *, stream: bool = False, kind: str = "trace") -> TraceRequest:
        """The whole trace."""
        functions = []
        while len(functions) < len(self._texts):  # encoding the names of one may find more
            functions.append(self._source(*self._texts[len(functions)]))
        return TraceRequest(tuple(self._invokes), tuple(functions), self._encoder.tensors.data(), stream, kind)

    def _number(self, function: FunctionType, what: str) -> int:
        if function not in self._functions:
            self._functions[function] = len(self._texts)
            self._texts.append((function, what))
        return self._functions[function]

    def _source(self, function: FunctionType, what: str) -> FunctionSource:
        encode, name = self._encoder.encode, function.__name__
        code = function_source(function, what)
        used = {
            each: encode(value, f"`{each}` of the function `{name}`") for each, value in _names_of(function).items()
        }
        defaults = encode(tuple(function.__defaults__ or ()), f"a default of `{name}`")
        by_name = (function.__kwdefaults__ or {}).items()
        return FunctionSource(
            code, used, defaults, {key: encode(value, f"`{key}=` of `{name}`") for key, value in by_name}
        )


def function_source(function: FunctionType, what: str) -> CodeSource:
    """The text of a function of the user's: one ``def``, or one ``lambda``. Raises ``ArgumentError``."""
    code = function.__code__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ArgumentError(f"{what} is an async function, which can't be called in a block")
    lines = tuple(linecache.getlines(code.co_filename, function.__globals__))
    source = _source_in(lines, code, code.co_filename, function.__name__, function.__qualname__)
    if source is None:
        raise ArgumentError(
            f"the source of the function {what} ({code.co_filename}:{code.co_firstlineno}) can't be found, so it can't "
            f"travel: write it with def, in a file or a cell"
        )
    return source


@functools.lru_cache(maxsize=256)  # a whole file is parsed for it
def _source_in(lines: tuple[str, ...], code: CodeType, filename: str, name: str, qualname: str) -> CodeSource | None:
    node = _node_of(code, lines) if lines else None
    if node is None:
        return None
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
    found = list(lines[first - 1 : node.end_lineno])
    if isinstance(node, ast.Lambda):
        assert node.end_lineno is not None
        text = ast.get_source_segment("".join(lines), node) or ""
        found = [" " * max(node.col_offset, 2) + "(" + text + ")"]
    elif not found[0][:1].isspace():
        found = [f" {line}" for line in found] if not _has_long_text(node) else found
    if isinstance(node, ast.FunctionDef) and not found[0][:1].isspace():
        from insitu.net.sources import made_source

        return made_source([node], filename, first, name, qualname)
    return CodeSource(filename, first, name, qualname, "".join(found).rstrip("\n"))


def _has_long_text(node: ast.AST) -> bool:
    constants = (each for each in ast.walk(node) if isinstance(each, (ast.Constant, ast.JoinedStr)))
    return any(each.end_lineno != each.lineno for each in constants)


def _node_of(code: CodeType, lines: Sequence[str]) -> ast.FunctionDef | ast.Lambda | None:
    try:
        tree = syntax_tree("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if code.co_firstlineno in (node.lineno, *(each.lineno for each in node.decorator_list)):
                found.append(node)
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            found.append(node)
    same = [node for node in found if isinstance(node, ast.FunctionDef) or _is_code_of(node, code)]
    return same[0] if len(same) == 1 or (same and isinstance(same[0], ast.FunctionDef)) else None


def _is_code_of(node: ast.Lambda, code: CodeType) -> bool:
    """Whether a lambda is that of the code, where several stand on a line."""
    made = compile(ast.Expression(node), "", "eval", dont_inherit=True)
    inner = next(each for each in made.co_consts if isinstance(each, CodeType))
    names = sorted((*inner.co_names, *inner.co_freevars, *inner.co_varnames))
    return names == sorted((*code.co_names, *code.co_freevars, *code.co_varnames)) and [
        each for each in inner.co_consts if not isinstance(each, CodeType)
    ] == [each for each in code.co_consts if not isinstance(each, CodeType)]


def _names_of(function: FunctionType) -> dict[str, Any]:
    """What a function closes over, and what it uses of its module; builtins are everywhere."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in sorted(_globals_of(function.__code__)):
        if name not in found and name in function.__globals__:
            found[name] = function.__globals__[name]
    return found


def _globals_of(code: CodeType) -> frozenset[str]:
    import dis

    own = {op.argval for op in dis.get_instructions(code) if op.opname == "LOAD_GLOBAL"}
    inner = (_globals_of(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*inner)
