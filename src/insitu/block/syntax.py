"""Texts as syntax trees, from any number of threads."""

from __future__ import annotations

import ast
import gc
import threading

# CPython 3.11 counts how deep all trees are together, and two at once are a SystemError (gh-106905): those of two
# threads, and one that a finaliser makes, to show a traceback say, while another is made.
_ONE_AT_A_TIME = threading.RLock()


def syntax_tree(text: str, filename: str = "<unknown>", flags: int = 0) -> ast.Module:
    """As ``ast.parse``; ``flags`` as for ``compile``."""
    with _ONE_AT_A_TIME:
        collects = gc.isenabled()
        gc.disable()
        try:
            return compile(text, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        finally:
            if collects:
                gc.enable()
