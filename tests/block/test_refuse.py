"""What a block can't hold is refused by name, before anything runs."""

from __future__ import annotations

import linecache
import sys
import textwrap
from typing import Any

import pytest

from insitu.block import BlockSyntaxError

from .test_portable import load

Trace = load("harness").Trace
ELSEWHERE = "can't be in a trace block, which runs beside the model and not in this function:"


def enter(body: str, around: str = "def f():", drive: Any = None) -> None:
    text = around + "\n    with Trace():\n" + textwrap.indent(body, " " * 8) + "\n"
    name = f"<refused {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"Trace": Trace, "ran": []}
    exec(compile(text, name, "exec"), namespace)
    function = namespace["f"]
    (drive or (lambda call: call()))(function)


def drive_generator(function: Any) -> None:
    next(function())


def drive_coroutine(function: Any) -> None:
    coroutine = function()
    try:
        coroutine.send(None)
    finally:
        coroutine.close()


LOOP = "def f():\n  for i in range(2):"
REFUSED = [
    ("return 1", "def f():", None, "`return`", 3, 9, "save what you need and return it after the `with`"),
    ("if ran:\n    return", "def f():", None, "`return`", 4, 13, "return it after the `with`"),
    ("yield 1", "def f():", drive_generator, "`yield`", 3, 9, "collect the values in a list that you save"),
    ("x = yield", "def f():", drive_generator, "`yield`", 3, 13, "and yield them after the `with`"),
    ("yield from ran", "def f():", drive_generator, "`yield from`", 3, 9, "yield them after the `with`"),
    ("await ran", "async def f():", drive_coroutine, "`await`", 3, 9, "await before the `with` or after it"),
    ("x = [await y for y in ran]", "async def f():", drive_coroutine, "`await`", 3, 14, "await before"),
    ("async for x in ran: pass", "async def f():", drive_coroutine, "`async for`", 3, 9, "use a plain `for`"),
    ("async with ran: pass", "async def f():", drive_coroutine, "`async with`", 3, 9, "use a plain `with`"),
    ("x = [y async for y in ran]", "async def f():", drive_coroutine, "an async comprehension", 3, 26, "plain"),
    ("break", LOOP, None, "`break` out of a loop around the block", 4, 9, "set a flag that you save"),
    ("continue", LOOP, None, "`continue` of a loop around the block", 4, 9, "and continue after the `with`"),
    ("for x in ran: pass\nelse: break", LOOP, None, "`break` out of a loop", 5, 15, "set a flag"),
    ("while ran:\n    break\nif ran: break", LOOP, None, "`break` out of a loop", 6, 17, "set a flag"),
]


@pytest.mark.parametrize(
    ("body", "around", "drive", "what", "line", "column", "instead"), REFUSED, ids=[each[0] for each in REFUSED]
)
def test_refused(body: str, around: str, drive: Any, what: str, line: int, column: int, instead: str) -> None:
    with pytest.raises(BlockSyntaxError) as caught:
        enter(body, around, drive)
    assert caught.value.msg.startswith(what)
    assert ELSEWHERE in caught.value.msg
    assert instead in caught.value.msg
    # Python counts a line before the `with` where the body stands in a loop.
    assert (caught.value.lineno, caught.value.offset) == (line, column)
    assert str(caught.value.filename).startswith("<refused")
    assert sys.gettrace() is None


def test_star_import_is_refused() -> None:
    text = "with Trace():\n    from os.path import *\n"
    linecache.cache["<star>"] = (len(text), None, text.splitlines(keepends=True), "<star>")
    with pytest.raises(BlockSyntaxError, match=r"`import \*` can't be in a trace block.*import the names"):
        exec(compile(text, "<star>", "exec"), {"Trace": Trace})


ALLOWED = [
    "def g():\n    return 1\nran.append(g())\nran.save()",
    "def g():\n    yield 1\nlist(g())",
    "g = lambda: (yield)",
    "async def g():\n    await g()\n    async with g: pass\n    return [x async for x in g]",
    "for i in range(3):\n    if i: break\n    else: continue",
    "while True:\n    for i in range(2):\n        continue\n    break",
    "class C:\n    def m(self): return 1\nC().m()",
    "for i in range(2):\n    def g():\n        for j in range(2): break\n        return j\n    g()",
    "from os.path import join, split as s",
    "sorted([2, 1], key=lambda x: -x)",
]


@pytest.mark.parametrize("body", ALLOWED)
def test_allowed(body: str) -> None:
    enter(body)
    enter(body, LOOP)
