"""Texts are parsed in many threads at once."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from insitu.block.syntax import syntax_tree


def test_many_threads_at_once() -> None:
    text = Path(__file__).read_text("utf-8") * 20
    wanted = ast.dump(ast.parse(text))
    with ThreadPoolExecutor(16) as pool:
        assert {ast.dump(tree) for tree in pool.map(syntax_tree, [text] * 64)} == {wanted}
