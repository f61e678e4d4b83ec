"""`x.save()` becomes a mark, with the names of the block that it is given to."""

from __future__ import annotations

import ast

import pytest

from insitu.block.rewrite import rewritten

M = "__insitu_save__"


def after(text: str, class_name: str | None = None, first: str | None = None) -> str:
    return ast.unparse(rewritten(ast.parse(text).body, class_name, first))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("h = x.save()", f"h = {M}(x, 'h')"),
        ("h: T = x.save()", f"h = {M}(x, 'h')"),
        ("a = b = x.save()", f"a = b = {M}(x, 'a', 'b')"),
        ("a, b = (x.save(), y.save())", f"a, b = ({M}(x, 'a'), {M}(y, 'b'))"),
        ("[a, (b, c)] = (x.save(), (y, z.save()))", f"[a, (b, c)] = ({M}(x, 'a'), (y, {M}(z, 'c')))"),
        ("a, *b = (x.save(), y.save())", f"a, *b = ({M}(x), {M}(y))"),
        ("a, b = x.save()", f"a, b = {M}(x, 'a', 'b')"),
        ("a, (b, *c) = x.save()", f"a, (b, *c) = {M}(x, 'a', 'b', 'c')"),
        ("p = a, b = (x.save(), y)", f"p = a, b = ({M}(x, 'a'), y)"),
        ("(n := x.save())", f"(n := {M}(x, 'n'))"),
        ("m = (n := x.save())", f"m = (n := {M}(x, 'm', 'n'))"),
        ("f((n := x.save()))", f"f((n := {M}(x, 'n')))"),
        ("h = x.save() if c else y.save()", f"h = {M}(x, 'h') if c else {M}(y, 'h')"),
        ("rows.save()", f"{M}(rows, 'rows')"),
        ("rows.append(x.save())", f"rows.append({M}(x))"),
        ("x.y[0].save()", f"{M}(x.y[0])"),
        ("h.x = y.save()", f"h.x = {M}(y)"),
        ("h[0] = y.save()", f"h[0] = {M}(y)"),
        ("h += x.save()", f"h += {M}(x)"),
        ("h = x.save().save()", f"h = {M}({M}(x), 'h')"),
        ("h = f(x.save()).y.save()", f"h = {M}(f({M}(x)).y, 'h')"),
        ("h = [x.save() for x in y].save()", f"h = {M}([{M}(x) for x in y], 'h')"),
        ("[(n := x.save()) for x in y]", f"[(n := {M}(x, 'n')) for x in y]"),
        ("h = lambda: x.save()", f"h = lambda: {M}(x)"),
        ("g = lambda: (n := x.save())", f"g = lambda: (n := {M}(x))"),
        ("def f():\n    h = x.save()", f"def f():\n    h = {M}(x)"),
        ("def f():\n    global h\n    h = x.save()", f"def f():\n    global h\n    h = {M}(x, 'h')"),
        ("def f():\n    nonlocal h\n    h = x.save()", f"def f():\n    global h\n    h = {M}(x, 'h')"),
        ("class C:\n    h = x.save()", f"class C:\n    h = {M}(x)"),
        ("for h in x.save():\n    pass", f"for h in {M}(x):\n    pass"),
        ("with x.save() as h:\n    k = h.save()", f"with {M}(x) as h:\n    k = {M}(h, 'k')"),
        ("model.save('file')", "model.save('file')"),
        ("x.save(a=1)", "x.save(a=1)"),
        ("x.save", "x.save"),
        ("save()", "save()"),
        ("f'{x.save()}'", f"f'{{{M}(x)}}'"),
    ],
)
def test_mark(before: str, expected: str) -> None:
    assert after(before) == ast.unparse(ast.parse(expected))
    assert ast.unparse(rewritten(ast.parse(after(before)).body, None, None)) == ast.unparse(ast.parse(expected))


def test_rewriting_for_a_block_inside_gives_names_anew() -> None:
    outer = rewritten(ast.parse("def f():\n    with t:\n        h = x.save()").body, None, None)
    function = outer.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert isinstance(function.body[0], ast.With)
    assert ast.unparse(rewritten(function.body[0].body, None, None)) == f"h = {M}(x, 'h')"


def test_places_are_kept() -> None:
    text = "a = 1\nh = (x\n   .y).save()\nself.__p"
    tree = rewritten(ast.parse(text).body, "C", None)
    assign = tree.body[1]
    assert isinstance(assign, ast.Assign)
    original = ast.parse(text).body[1]
    assert isinstance(original, ast.Assign)
    for node, other in ((assign, original), (assign.value, original.value)):
        assert (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == (
            other.lineno,
            other.col_offset,
            other.end_lineno,
            other.end_col_offset,
        )


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("self.__x = __y", "self._C__x = _C__y"),
        ("self.__x__ = x.__class__", "self.__x__ = x.__class__"),
        ("f(__k=__v)", "f(__k=_C__v)"),
        ("def __f(__a, *__b, **__c):\n    return __a", "def _C__f(_C__a, *_C__b, **_C__c):\n    return _C__a"),
        ("import __m", "import __m as _C__m"),
        ("import a.__m", "import a.__m"),
        ("from a import b as __c", "from a import b as _C__c"),
        ("try:\n    pass\nexcept E as __e:\n    __e", "try:\n    pass\nexcept E as _C__e:\n    _C__e"),
        ("class D:\n    x = self.__x", "class D:\n    x = self.__x"),
        ("class D(__B):\n    pass", "class D(_C__B):\n    pass"),
        ("class __D:\n    x = self.__x", "class _C__D:\n    x = self._D__x"),
        ("def f():\n    global __g\n    __g = 1", "def f():\n    global _C__g\n    _C__g = 1"),
        ("match __x:\n    case [__a, *__b]:\n        pass", "match _C__x:\n    case [_C__a, *_C__b]:\n        pass"),
        ("match x:\n    case {1: __a, **__r}:\n        pass", "match x:\n    case {1: _C__a, **_C__r}:\n        pass"),
    ],
)
def test_private_names(before: str, expected: str) -> None:
    assert after(before, "C") == expected
    assert after(before, "_C") == expected
    assert after(before, "__") == ast.unparse(ast.parse(before))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("super().f()", "super(__class__, self).f()"),
        ("super(A, b).f()", "super(A, b).f()"),
        ("def g(me):\n    super()", "def g(me):\n    super(__class__, me)"),
        ("def g():\n    super()", "def g():\n    super()"),
        ("class D:\n    def g(me):\n        super()", "class D:\n\n    def g(me):\n        super()"),
        ("[super() for x in y]", "[super(__class__, self) for x in y]"),
    ],
)
def test_super(before: str, expected: str) -> None:
    assert after(before, "C", "self") == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("nonlocal a", "global a"),
        ("def f():\n    nonlocal a\n    a = 1", "def f():\n    global a\n    a = 1"),
        (
            "def f(a):\n    def g():\n        nonlocal a, b\n        a = b = 1",
            "def f(a):\n\n    def g():\n        nonlocal a\n        global b\n        a = b = 1",
        ),
        (
            "def f():\n    global a\n    a = 1\n    def g():\n        nonlocal a",
            "def f():\n    global a\n    a = 1\n\n    def g():\n        global a",
        ),
        (
            "def f():\n    import a\n    def g():\n        def h():\n            nonlocal a",
            "def f():\n    import a\n\n    def g():\n\n        def h():\n            nonlocal a",
        ),
    ],
)
def test_nonlocal(before: str, expected: str) -> None:
    assert after(before) == expected


def test_text_is_no_docstring() -> None:
    assert after("'text'\nx = 1") == "pass\n'text'\nx = 1"
