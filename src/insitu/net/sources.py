"""Code as text: a block, or a function of the caller's, with the lines that it came from."""

from __future__ import annotations

import ast
import functools
import linecache
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from insitu.block import Block
from insitu.block.marks import Unmark
from insitu.block.rewrite import rewritten
from insitu.block.source import compile_quietly
from insitu.block.syntax import syntax_tree
from insitu.block.walk import clone
from insitu.net.errors import WireError

__all__ = ["LONGEST", "PREFIX", "CodeSource", "block_source", "is_remote", "local_name", "remote_name"]

LONGEST = 200_000
"""Characters of a text, and of all that a request brings."""
_DEEPEST = 150
_LAST_LINE = 10_000_000
_TEXT = 1000
PREFIX = "<client>"
"""What the file names of a client's code begin with at the server, so that none is taken for a file there."""


@dataclass(frozen=True)
class CodeSource:
    """The text of a block's body, or of one function.

    ``filename``, ``first`` and ``name`` are what tracebacks show: the file, the line at which the text begins, and the
    function around it. The text keeps its indentation and columns. Where it could not be had from the file,
    it was made from the code, and ``lines`` says where each of its statements (in the order of ``ast.walk``) came from.
    """

    filename: str
    first: int
    name: str
    qualname: str
    text: str
    lines: tuple[int, ...] | None = None

    def tree(self) -> ast.Module:
        """Its statements, at their places in the caller's file. Raises ``WireError`` for what is no Python."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole = syntax_tree("if 1:\n" + self.text)
            _require_shallow(whole)
        except SyntaxError as error:
            line = self.first + (error.lineno or 2) - 2
            raise WireError(f"{self.filename}, line {line}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError, OverflowError):
            raise WireError(
                "the code can't be parsed: it has null bytes, or is nested too deeply", "too-deep"
            ) from None
        if len(whole.body) != 1 or not isinstance(whole.body[0], ast.If) or whole.body[0].orelse:
            raise WireError("the code is no body of one block")
        module = ast.Module(whole.body[0].body, [])
        if self.lines is None:
            ast.increment_lineno(module, self.first - 2)
        else:
            _put_lines(module, self.lines)
        return module

    def block(self) -> Block:
        """The block, to be run as trusted code: nothing is checked in it."""
        tree = rewritten(self.tree().body, None, None)
        return Block(remote_name(self.filename), self.first, self.name, self.qualname, tree)

    def as_json(self) -> dict[str, Any]:
        found = {"file": self.filename, "first": self.first, "name": self.name, "qualname": self.qualname}
        return {**found, "text": self.text, **({} if self.lines is None else {"lines": list(self.lines)})}

    @classmethod
    def of_json(cls, data: Any) -> CodeSource:
        """Raises ``WireError``."""
        if not isinstance(data, dict) or not data.keys() - {"lines"} == {"file", "first", "name", "qualname", "text"}:
            raise WireError("code has file, first, name, qualname and text")
        texts = [data[key] for key in ("file", "name", "qualname")]
        if not all(isinstance(each, str) and len(each) <= _TEXT and each.isprintable() for each in texts):
            raise WireError("the file and names of code are short texts")
        if not isinstance(data["text"], str) or len(data["text"]) > LONGEST:
            raise WireError(f"code is a text of at most {LONGEST} characters", "too-large")
        lines = data.get("lines")
        if not _is_line(data["first"]) or not (
            lines is None or (isinstance(lines, list) and all(map(_is_line, lines)))
        ):
            raise WireError("lines are numbers from 1 on")
        return cls(texts[0], data["first"], texts[1], texts[2], data["text"], None if lines is None else tuple(lines))


@functools.lru_cache(maxsize=256)  # it is parsed again, to tell whether it is the block's
def block_source(block: Block) -> CodeSource:
    """The text of a block that was captured here."""
    text = _text_of(block)
    if text is not None:
        return CodeSource(block.filename, text[0], block.name, block.qualname, text[1])
    tree = Unmark().visit(clone(block.tree))
    return made_source(tree.body, block.filename, block.lineno, block.name, block.qualname)


def made_source(body: list[ast.stmt], filename: str, lineno: int, name: str, qualname: str) -> CodeSource:
    """The text of statements, made from them."""
    lines = tuple(node.lineno for node in _statements(ast.Module(body, [])))
    text = "\n".join(" " + line for line in ast.unparse(ast.Module(body, [])).split("\n"))
    if _has_long_text(body):  # the indentation would get into it
        text = " " + "\n ".join(ast.unparse(_OneLine().visit(clone(each))) for each in body)
    return CodeSource(filename, lineno, name, qualname, text, lines)


def remote_name(filename: str) -> str:
    """The name that a client's file has in code objects at the server."""
    return filename if is_remote(filename) else PREFIX + filename


def local_name(filename: str) -> str:
    """The client's own name for it."""
    return filename.removeprefix(PREFIX)


def is_remote(filename: str) -> bool:
    return filename.startswith(PREFIX)


def _text_of(block: Block) -> tuple[int, str] | None:
    """First line and text of a block's body as they are in its file, if that gives the very same block."""
    body = [node for node in block.tree.body if not (isinstance(node, ast.Pass) and node.end_lineno is None)]
    if not body or is_remote(block.filename):
        return None
    first, last = body[0].lineno, max(node.end_lineno or node.lineno for node in body)
    lines = linecache.getlines(block.filename)[first - 1 : last]
    if len(lines) != last - first + 1:
        return None
    start = min(node.col_offset for node in body if node.lineno == first)
    blank = len(lines[0].encode()[:start].decode(errors="replace"))
    lines[0] = " " * max(start, 1) + lines[0][blank:]
    text = "".join(lines).rstrip("\n")
    try:
        tree = rewritten(CodeSource(block.filename, first, block.name, block.qualname, text).tree().body, None, None)
        same = ast.dump(tree) == ast.dump(block.tree)
        same = same and compile_quietly(tree, block.filename, block.flags).co_code is not None
    except (WireError, SyntaxError, ValueError):
        return None
    return (first, text) if same else None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _put_lines(module: ast.Module, lines: tuple[int, ...]) -> None:
    statements = list(_statements(module))
    if len(statements) != len(lines):
        raise WireError("there is not a line for each statement")
    for statement, line in zip(reversed(statements), reversed(lines), strict=True):
        # Inner statements come later in the walk, and keep what they are given.
        for node in ast.walk(statement):
            if hasattr(node, "lineno") and not hasattr(node, "placed"):
                node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
                node.placed = True  # type: ignore[attr-defined]


def _require_shallow(tree: ast.AST) -> None:
    pending = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > _DEEPEST:
            raise RecursionError
        pending += ((child, depth + 1) for child in ast.iter_child_nodes(node))


def _has_long_text(body: list[ast.stmt]) -> bool:
    return any("\n" in ast.unparse(node) for each in body for node in ast.walk(each) if isinstance(node, ast.Constant))


class _OneLine(ast.NodeTransformer):
    """Texts of several lines are written by ``unparse`` in triple quotes only as statements of their own."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def _is_line(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LAST_LINE
