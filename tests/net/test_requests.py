"""A trace arrives as it was written: its blocks, their lines, and what they take along."""

from __future__ import annotations

import ast
import linecache
from typing import Any

import numpy
import pytest
import torch

from insitu import ArgumentError
from insitu.block import Saves
from insitu.net import CodeSource, FunctionRef, InvokeRequest, Named, TraceBuilder, TraceRequest, WireError
from tests.net.sent import Sent, sent

OFFSET = 3


def shifted(value: int, by: int = OFFSET, *, twice: bool = False) -> int:
    return value + by * (1 + twice)


def even(number: int) -> bool:
    return number == 0 or odd(number - 1)


def odd(number: int) -> bool:
    return number != 0 and even(number - 1)


doubled = lambda value: value * 2  # noqa: E731


def arrived(trace: Sent) -> dict[str, Any]:
    """What the block that arrived saves, run here as trusted code."""
    (one,) = trace.request.invokes
    values = trace.request.decoded(lambda ref: ref).invokes[0].values
    assert one.block is not None
    block, saves = one.block.block(), Saves()
    assert block.filename == "<client>" + trace.captured.filename
    namespace = block.run(values, saves, "__main__")
    return saves.collect(namespace, block.binds)


def test_a_block_arrives_with_its_values() -> None:
    rows = [1, torch.ones(2)]
    with Sent() as trace:
        total = (rows[1].sum().item() + rows[0]).save()
        text = """two
        lines""".save()
    assert arrived(trace) == {"total": 3.0, "text": "two\n        lines"}
    assert trace.request.invokes[0].sampling == {"max_tokens": 1}


def test_the_text_is_that_of_the_file_with_its_lines_and_columns() -> None:
    with Sent() as trace:
        a = 1

        if a:  # a comment
            b = [
                a,
                a + 1,
            ].save()
    code = trace.request.invokes[0].block
    assert code is not None
    assert code.lines is None
    assert "# a comment" in code.text
    there = [(node.lineno, node.col_offset, node.end_lineno) for node in ast.walk(code.block().tree) if is_placed(node)]
    here = [
        (node.lineno, node.col_offset, node.end_lineno) for node in ast.walk(trace.captured.tree) if is_placed(node)
    ]
    assert there == here


def is_placed(node: ast.AST) -> bool:
    return isinstance(node, (ast.expr, ast.stmt))


def test_a_block_on_the_line_of_its_with_arrives() -> None:
    text = "with Sent() as trace: a = 5; b = (a + 1).save()\n"
    linecache.cache["<one line>"] = (len(text), None, [text], "<one line>")
    names: dict[str, Any] = {"Sent": Sent}
    exec(compile(text, "<one line>", "exec"), names)
    trace = names["trace"]
    assert trace.request.invokes[0].block.lines is None
    assert arrived(trace) == {"b": 6}


def test_a_block_with_more_items_arrives_with_the_lines_of_its_statements() -> None:
    class Other:
        def __enter__(self) -> int:
            return 7

        def __exit__(self, *_: Any) -> None:
            pass

    other = None
    with Sent() as trace, other as c:
        d = (c).save()
        text = "one\ntwo"
    code = trace.request.invokes[0].block
    assert code is not None
    assert code.lines is not None
    there = [node.lineno for node in ast.walk(code.block().tree) if isinstance(node, ast.stmt)]
    assert there == [node.lineno for node in ast.walk(trace.captured.tree) if isinstance(node, ast.stmt)]


def test_functions_travel_as_source_with_what_they_use() -> None:
    by = 10

    def closing(value: int) -> int:
        return shifted(value) + by

    with Sent() as trace:
        a = closing(1).save()
        b = even(4).save()
        c = doubled(2).save()
    request = trace.request
    names = [one.code.name for one in request.functions]
    assert names == ["closing", "even", "<lambda>", "shifted", "odd"] or sorted(names) == sorted(
        ["closing", "even", "<lambda>", "shifted", "odd"]
    )
    decoded = request.decoded(lambda ref: ref)
    found = {source.code.name: one for source, one in zip(request.functions, decoded.functions, strict=True)}
    assert found["closing"].names == {"by": 10, "shifted": FunctionRef(names.index("shifted"))}
    assert (found["shifted"].defaults, found["shifted"].kwdefaults) == ((3,), {"twice": False})
    assert found["odd"].names == {"even": FunctionRef(names.index("even"))}
    for source in request.functions:
        (statement,) = source.code.tree().body
        assert isinstance(statement, (ast.FunctionDef, ast.Expr))


def test_one_object_in_two_invokes_stays_one() -> None:
    rows: list[Any] = []
    builder = TraceBuilder()

    def first(tracer: Any) -> None:
        rows.append(1)

    def second(tracer: Any) -> None:
        rows.append(2)

    builder.add("a", first, {"rows": rows})
    builder.add("b", second, {"rows": rows})
    request = sent(builder)
    decoded = request.decoded(lambda ref: ref)
    assert decoded.invokes[0].values["rows"] is decoded.invokes[1].values["rows"] is decoded.functions[1].names["rows"]
    assert [one.function for one in request.invokes] == [0, 1]


def test_nodes_and_tracers_travel_by_name_and_arrays_become_tensors() -> None:
    vector = numpy.ones(3, numpy.float32)
    with Sent() as trace:
        x = (trace, vector)
    values = trace.request.decoded(lambda ref: ref).invokes[0].values
    assert values["trace"] == Named("tracer")
    assert isinstance(values["vector"], torch.Tensor)


class Thing:
    def method(self) -> None:
        pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Thing(), "`value` is .*Thing, which can't travel; numbers, texts, lists"),
        (Thing, "classes stay here"),
        (Thing().method, "functions of your own travel"),
        (ast, "`value` is a module"),
        (eval("lambda: 0"), "source of the function `value` .* can't be found"),
    ],
)
def test_a_value_that_cannot_travel_is_named(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        with Sent():
            print(value)


def test_a_value_that_a_function_uses_is_named() -> None:
    thing = Thing()

    def helper() -> None:
        print(thing)

    with pytest.raises(ArgumentError, match=r"`thing` of the function `helper` is .*Thing"):
        with Sent():
            helper()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" x = (", "a.py, line 7: '\\(' was never closed"),
        (" x = 1\nelse:\n y = 2", "no body of one block"),
        (" x = 1\ny = 2", "no body of one block"),
        (" x = " + "(" * 500 + ")" * 500, "line 7: too many nested|can't be parsed"),
        (" x = " + "-" * 5000 + "1", "nested too deeply|can't be parsed"),
        (" x = '\0'", "can't be parsed|null bytes"),
        (" x = " + "9" * 5000, "line 7"),
        (" x = 1" + " + 1" * 4000, "nested too deeply"),
    ],
)
def test_text_that_is_no_block_is_refused(text: str, message: str) -> None:
    with pytest.raises(WireError, match=message):
        CodeSource("a.py", 7, "f", "f", text).tree()


def test_the_code_of_a_request_is_bounded() -> None:
    one = CodeSource("a.py", 1, "f", "f", " x = 1\n" * 20_000)
    whole = [InvokeRequest(1, one, {})] * 10
    assert len(TraceRequest.of_frame(TraceRequest(whole).frame()).invokes) == 10
    others = [InvokeRequest(1, CodeSource("a.py", line, "f", "f", one.text), {}) for line in (1, 2)]
    with pytest.raises(WireError, match="200000 characters") as caught:
        TraceRequest.of_frame(TraceRequest(others).frame())
    assert caught.value.code == "too-large"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"insitu": 99},
        {"invokes": []},
        {"invokes": {}},
        {"more": 1},
        {"functions": [{}]},
    ],
    ids=str,
)
def test_a_header_that_is_no_trace_is_refused(change: dict[str, Any]) -> None:
    builder = TraceBuilder()
    builder.add("a", shifted)
    frame = builder.request().frame()
    with pytest.raises(WireError):
        TraceRequest.of_frame(frame._replace(header={**frame.header, **change}))
