"""Blocks as data: what they read and bind, when they are equal, how they run."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.block import ArgumentError, Block, FunctionBlock, Saves
from insitu.block.rewrite import rewritten

from .test_portable import load

Trace = load("harness").Trace


def block_of(text: str) -> Block:
    return Block("<some file>", 1, "f", "f", rewritten(ast.parse(text).body, None, None))


@pytest.mark.parametrize(
    ("text", "reads", "binds"),
    [
        ("x = y", "y", "x"),
        ("x += 1", "x", "x"),
        ("x.y = z[0]", "x z", ""),
        ("x: T = y", "y", "x"),
        ("x: T", "", ""),
        ("del x", "x", "x"),
        ("import a.b, c as d\nfrom e import g", "", "a d g"),
        ("for i in r: pass", "r", "i"),
        ("with a as b, c as (d, e): pass", "a c", "b d e"),
        ("try: a\nexcept E as e: b", "E a b", "e"),
        ("match s:\n  case [p, *q]: pass\n  case {'k': v, **r}: pass\n  case C(x=w): pass", "C s", "p q r v w"),
        ("[i for i in r if i > n]", "n r", ""),
        ("[(last := i) for i in r]", "r", "last"),
        ("g = lambda a, b=c: a + b + d", "c d", "g"),
        ("def g(a, *b, k=c, **e):\n  x = a + d\n  return x", "c d", "g"),
        ("def g():\n  global h\n  h = 1", "", "g h"),
        ("def g():\n  nonlocal h\n  h += 1", "h", "g h"),
        ("def g():\n  def k():\n    return deep\n  return k", "deep", "g"),
        ("@d\nclass C(B, metaclass=M):\n  x = y\n  z = x\n  def m(self): return C, w", "B C M d w x y", "C"),
        ("print(len(x))", "len print x", ""),
        ("h = x.save()", "x", "h"),
        ("if 0:\n  a = b", "", "a"),
        ("f'{a!r:>{b}}'", "a b", ""),
        ("{k: v for k, v in d.items()}", "d", ""),
        ("(i for i in r)", "r", ""),
        ("g = lambda: (n := m)", "m", "g"),
    ],
)
def test_reads_and_binds(text: str, reads: str, binds: str) -> None:
    block = block_of(text)
    own = {"__name__"} if "class" in text else set()
    assert block.reads - own == set(reads.split())
    assert block.binds <= set(binds.split()) if "if 0" in text else block.binds == set(binds.split())


def test_code_has_the_callers_names_and_lines() -> None:
    trace = Trace()
    with trace:
        frame = sys._getframe().save()
    block = trace.block
    assert (block.filename, block.name, frame.f_code) == (
        __file__,
        test_code_has_the_callers_names_and_lines.__name__,
        block.code,
    )
    assert frame.f_lineno == block.lineno + 1
    assert frame.f_globals["__name__"] == __name__
    assert frame.f_globals is frame.f_locals


def test_namespace_is_fresh_and_code_is_the_same() -> None:
    block = block_of("x = [].save()\nx.append(y)")
    first, second = (block.run({"y": y}, Saves(), "some_module") for y in (1, 2))
    assert (first["x"], second["x"]) == ([1], [2])
    assert first["__name__"] == "some_module"
    assert first["__builtins__"].len is len


def test_captured_value_shadows_a_builtin() -> None:
    len = lambda x: "mine"  # noqa: E731
    with Trace():
        h = len([]).save()
    assert h == "mine"


def test_digest_tells_code_file_and_line_apart() -> None:
    same = [block_of("x = 1"), block_of("x = 1  # comment")]
    other = [block_of("x = 2"), block_of("\nx = 1"), Block("<other>", 1, "f", "f", same[0].tree)]
    assert same[0] == same[1]
    assert len({block.digest for block in same + other}) == 4
    assert same[0] != "something else"
    assert len(same[0].digest) == 64


def test_future_flags_are_kept() -> None:
    lines = [
        "from __future__ import annotations",
        "from harness import Trace",
        "with Trace():",
        "    def g(x: Missing): pass",
        "    h = g.__annotations__.save()",
    ]
    text = "\n".join(lines)
    linecache.cache["<future>"] = (len(text), None, text.splitlines(keepends=True), "<future>")
    namespace: dict[str, object] = {}
    exec(compile(text, "<future>", "exec"), namespace)
    assert namespace["h"] == {"x": "Missing"}


# The function form.


def test_function_block() -> None:
    def double(tracer: int) -> int:
        return 2 * tracer

    block = FunctionBlock(double)
    assert block.run(4) == 8
    assert (block.filename, block.lineno) == (__file__, double.__code__.co_firstlineno)
    assert block.qualname == "test_function_block.<locals>.double"
    assert block.digest == FunctionBlock(double).digest
    assert block.digest != FunctionBlock(lambda tracer: 3 * tracer).digest


class Callable:
    def __call__(self, tracer: int) -> int:
        return tracer + 1

    def method(self, tracer: int) -> int:
        return tracer + 2


@pytest.mark.parametrize(
    ("fn", "answer", "line_of"),
    [
        (functools.partial(lambda a, tracer: a + tracer, 5), 6, None),
        (Callable(), 2, Callable.__call__),
        (Callable().method, 3, Callable.method),
        (functools.wraps(Callable.method)(lambda tracer: 7), 7, Callable.method),
        (str, "1", None),
        (len.__class__, None, None),
    ],
)
def test_function_block_of_anything_callable(fn, answer, line_of) -> None:
    block = FunctionBlock(fn)
    if answer is not None:
        assert block.run(1) == answer
    if line_of is not None:
        assert (block.filename, block.lineno) == (__file__, line_of.__code__.co_firstlineno)
    assert len(block.digest) == 64


def test_function_block_of_no_function() -> None:
    with pytest.raises(ArgumentError, match="a function of the tracer is wanted, not int"):
        FunctionBlock(3)  # type: ignore[arg-type]


# A block means what its text means in a function.

NAMES = st.sampled_from(["a", "b", "c"])
ATOMS = st.one_of(NAMES, st.integers(0, 9).map(str))


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0:
        return draw(ATOMS)

    def inner() -> str:
        return draw(expressions(depth - 1))

    kind = draw(st.sampled_from(["atom", "sum", "loop", "lambda", "walrus", "if"]))
    if kind == "sum":
        return f"({inner()} {draw(st.sampled_from('+-*'))} {inner()})"
    if kind == "loop":
        return f"sum([x + {inner()} for x in range({draw(ATOMS)} % 4)])"
    if kind == "lambda":
        return f"(lambda y: y - {inner()})({inner()})"
    if kind == "walrus":
        return f"({draw(NAMES)} := {inner()})"
    if kind == "if":
        return f"({inner()} if {inner()} % 2 else {inner()})"
    return draw(ATOMS)


@st.composite
def statements(draw: st.DrawFn, depth: int = 3) -> list[str]:
    def inner() -> list[str]:
        return indented(draw(statements(depth - 1)))

    name, value = draw(NAMES), draw(expressions())
    kinds = ["set", "add", "swap"] + (["if", "for", "try", "two", "def"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "add":
        return [f"{name} += {value}"]
    if kind == "swap":
        return [f"{name}, c = {value}, {name}"]
    if kind == "if":
        return [f"if {value} % 2:", *inner(), "else:", *inner()]
    if kind == "for":
        return ["for i in range(2):", *inner()]
    if kind == "try":
        return ["try:", *inner(), f"    1 / ({name} % 2)", "except ZeroDivisionError as e:", f"    {name} += 1"]
    if kind == "two":
        return [*draw(statements(depth - 1)), *draw(statements(depth - 1))]
    if kind == "def":
        return ["def g(a, b, c):", *inner(), "    return a + b - c", f"c = g(a, {value}, b)"]
    return [f"{name} = {value}"]


def indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def outcome(function: Any) -> Any:
    """What it returns, or which error it raises where: values may differ from run to run in nothing else."""
    try:
        return function(1, 2, 3)
    except Exception as error:
        return type(error)


@given(statements())
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_block_means_what_its_text_means(lines: list[str]) -> None:
    bounded = [*lines, "a %= 1000; b %= 1000; c %= 1000"]
    native = "\n".join(["def f(a, b, c):", *indented(bounded), "    return a, b, c"])
    traced = "\n".join(
        [
            "def f(a, b, c):",
            "    with Trace():",
            *indented(indented(bounded)),
            "        a.save(); b.save(); c.save()",
            "    return a, b, c",
        ]
    )
    name = f"<generated {hash(traced)}>"
    linecache.cache[name] = (len(traced), None, traced.splitlines(keepends=True), name)
    try:
        results = []
        for text in (native, traced):
            namespace = {"Trace": Trace}
            exec(compile(text, name, "exec"), namespace)
            results.append(outcome(namespace["f"]))
    finally:
        del linecache.cache[name]
    assert results[0] == results[1]
