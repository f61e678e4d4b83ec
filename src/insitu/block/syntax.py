"""Texts as syntax trees, from any number of threads."""

from __future__ import annotations

import ast
import threading

# CPython 3.11 counts how deep the trees of all threads together are, and two at once are a SystemError (gh-106905).
_ONE_AT_A_TIME = threading.Lock()


def syntax_tree(text: str, filename: str = "<unknown>", flags: int = 0) -> ast.Module:
    """As ``ast.parse``; ``flags`` as for ``compile``."""
    with _ONE_AT_A_TIME:
        return compile(text, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
