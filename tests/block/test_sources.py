"""Where the source of a block is found, and what is said where it is not."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import linecache
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from insitu.block import SourceError

from .test_portable import HERE, load

Trace = load("harness").Trace
PATH = os.pathsep.join([str(HERE), str(HERE.parent.parent / "src")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH, "PYTHONDONTWRITEBYTECODE": "1"}

SCRIPT = """\
from harness import Trace
factor = 3
def f(x):
    with Trace() as t:
        h = (x * factor).save()
    return h
with Trace() as t:
    g = (f(2) + 1).save()
print(f(5), g, t)
"""
PRINTED = "15 7 the target\n"


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=60, **options
    )


def module_from(folder: Path, name: str, text: str) -> ModuleType:
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


# Found.


def test_pytest_rewritten_code() -> None:
    value = 2
    with Trace():
        assert value + 1 == 3
        h = (value * 2).save()
        assert h == 4, f"{h} is not 4"
    assert h == 4


def test_failing_assertion_of_rewritten_code() -> None:
    with pytest.raises(AssertionError) as caught:
        with Trace():
            h = 1
            assert h == 2, "not two"
    assert str(caught.value) == "not two"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_script(tmp_path: Path, encoding: str) -> None:
    script = tmp_path / "script.py"
    text = f"# coding: {encoding}\n# é\n" + SCRIPT + "with Trace(): name = 'é'.save()\nprint(ascii(name))\n"
    script.write_bytes(text.encode(encoding))
    done = python(str(script))
    assert (done.stdout, done.stderr) == (PRINTED + r"'\xe9'" + "\n", "")


def test_module_run_with_m(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text(SCRIPT)
    done = python("-m", "some_module", cwd=tmp_path)
    assert (done.stdout, done.stderr) == (PRINTED, "")


def test_command_line() -> None:
    assert python("-c", SCRIPT).stdout == PRINTED
    assert python("-Wd", "-Bc", SCRIPT).stdout == PRINTED


def test_command_line_is_not_mistaken() -> None:
    code = "exec(compile('with Trace(): h = 1 .save()', '<string>', 'exec'), {'Trace': Trace})"
    done = python("-c", f"from harness import Trace\nh = 5\n{code}\nwith Trace(): h = 2 .save()\nprint(h)")
    assert done.stdout == "2\n"


def test_standard_input_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with open(tmp_path / "script.py") as file:
        done = python(stdin=file)
    assert (done.stdout, done.stderr) == (PRINTED, "")


def test_standard_input_that_is_a_pipe() -> None:
    done = python("-", input=SCRIPT)
    assert "SourceError: the source of the `with` at <stdin>:7 can't be found. Use the function form" in done.stderr


def test_exec_with_source_in_linecache() -> None:
    name = "<made by a test>"
    linecache.cache[name] = (len(SCRIPT), None, SCRIPT.splitlines(keepends=True), name)
    out = io.StringIO()
    namespace: dict[str, Any] = {"__name__": "made"}
    load("harness")
    with redirect_stdout(out):
        exec(compile(linecache.cache[name] and SCRIPT, name, "exec"), namespace)
    assert out.getvalue() == PRINTED
    assert (namespace["g"], namespace["f"](7)) == (7, 21)


def test_exec_of_a_string_that_the_caller_holds() -> None:
    out = io.StringIO()
    text = SCRIPT
    with redirect_stdout(out):
        exec(text, {"__name__": "made"})
    assert out.getvalue() == PRINTED


def test_exec_with_separate_locals() -> None:
    text = "with Trace() as t:\n    h = (a + b).save()\n"
    local: dict[str, Any] = {"a": 1}
    module = {"b": 2, "Trace": Trace}
    exec(text, module, local)
    assert local == {"a": 1, "t": "the target", "h": 3}
    assert "h" not in module


def test_doctest() -> None:
    text = """
    >>> x = 2
    >>> with Trace() as t:
    ...     h = (x + 1).save()
    >>> h, t
    (3, 'the target')
    >>> def f():
    ...     with Trace():
    ...         return 1
    >>> f()
    Traceback (most recent call last):
    insitu.block.errors.BlockSyntaxError: ...
    """
    test = doctest.DocTestParser().get_doctest(text, {"Trace": Trace}, "some", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(test) == (0, 5)


@pytest.fixture
def ipython() -> Any:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.testing.globalipapp import get_ipython, start_ipython

    shell = start_ipython() or get_ipython() or InteractiveShell.instance()
    shell.user_ns["Trace"] = Trace
    return shell


CELL = """\
y = 5
def helper(x):
    return x + y

with Trace() as t:
    h = helper(2).save()

    k = [helper(i) for i in range(2)].save()
z = (h, k, t)
z
"""


@pytest.mark.parametrize(
    "cell",
    [
        CELL,
        "%%time\n" + CELL,
        "%%capture\n" + CELL,
        "!true\n%matplotlib --list\n" + CELL,
        "await_ = 0\nimport asyncio\nawait asyncio.sleep(0)\n" + CELL,
        "%%time\n\n" + CELL.replace("    ", "\t"),
        CELL + ";",
    ],
    ids=["plain", "time", "capture", "magics", "await", "time_tabs", "quiet"],
)
def test_ipython_cell(ipython: Any, cell: str) -> None:
    for name in ("h", "k", "t", "z"):
        ipython.user_ns.pop(name, None)
    result = ipython.run_cell(cell, store_history=True)
    result.raise_error()
    assert ipython.user_ns["z"] == (7, [5, 6], "the target")


def test_ipython_cells_run_again_and_functions_of_earlier_cells(ipython: Any) -> None:
    ipython.run_cell("def f(x):\n    with Trace():\n        h = (x + 1).save()\n    return h").raise_error()
    ipython.run_cell("r = f(1)").raise_error()
    assert ipython.user_ns["r"] == 2
    ipython.run_cell("def f(x):\n    with Trace():\n        h = (x + 2).save()\n    return h").raise_error()
    ipython.run_cell("%time r = f(1)").raise_error()
    assert ipython.user_ns["r"] == 3
    for number in range(3):
        ipython.run_cell(f"with Trace(): r = {number} .save()").raise_error()
        assert ipython.user_ns["r"] == number


def test_notes_that_others_hang_on_trees(ipython: Any) -> None:
    """IPython's tracebacks note the parent of every node, some of which all trees share."""
    assert not ipython.run_cell("def g():\n    return 1 / 0\ng()").success
    load_node = ast.parse("x").body[0].value.ctx  # type: ignore[attr-defined]
    before = dict(vars(load_node))
    load_node.parent = ast.parse("x")
    try:
        ipython.run_cell("trace = Trace()\nwith trace: h = [x for x in range(2)].save()").raise_error()
        assert pickle.loads(pickle.dumps(ipython.user_ns["trace"].block)) == ipython.user_ns["trace"].block
        assert b"parent" not in pickle.dumps(ipython.user_ns["trace"].block)
    finally:
        vars(load_node).clear()
        vars(load_node).update(before)


def test_ipython_run_and_timeit(ipython: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ipython.run_cell(f"%run {script}").raise_error()
    assert ipython.user_ns["g"] == 7
    ipython.run_cell("%%timeit -n1 -r1\nwith Trace():\n    q = f(1).save()\nassert q == 3\nzz = 1").raise_error()
    ipython.run_cell(
        "def f(x):\n    with Trace():\n        h = (x + 1).save()\n    return h\n%timeit -n1 -r1 f(1)"
    ).raise_error()


# How it is written.


@pytest.mark.parametrize("indent", [" ", "  ", "   ", " " * 8, "\t"], ids=["1", "2", "3", "8", "tab"])
def test_indentation(tmp_path: Path, indent: str) -> None:
    text = textwrap.dedent(
        """\
        from harness import Trace
        class Thing:
            def method(self, x):
                if x:
                    with Trace() as t:
        # a comment in the first column
                        text = '''
        in the first column
            and not
        '''.save()

                        for i in range(3):
                            if i == 1:
                                break
                        k = (i + \\
        x).save()
                    return t, text, k
        """
    ).replace("    ", indent)
    module = module_from(tmp_path, f"indented_{len(indent)}_{ord(indent[0])}", text)
    expected_text = f"\nin the first column\n{indent}and not\n"
    assert module.Thing().method(2) == ("the target", expected_text, 3)


LAYOUTS = {
    "parentheses": "with (\n    Trace(\n    ) as t,\n):\n    h = 1 .save()\n",
    "two_in_parentheses": "with (\n  Trace() as u,\n  Null() as n\n):\n    h = 1 .save()\n",
    "backslash": "with \\\n  Trace() \\\n    as t:\n    h = 1 .save()\n",
    "one_line": "if 1:\n with Trace(): h = 1 .save(); k = 2\n",
    "semicolons": "x = 1; y = 2\nwith Trace(): h = 1 .save(); k = h; m = k\n",
    "comment_after_colon": "with Trace():  # comment\n    # comment\n\n    h = 1 .save()  # comment\n# end\n",
    "lambda_around": "g = (lambda f: f)\nwith g(lambda: Trace())() as t:\n    h = 1 .save()\n",
    "lines_in_the_head": "with Trace(\n  (lambda: 1)(\n  )\n) as t:\n    h = t.save()\n",
    "form_feed": "\f\nwith Trace():\n    h = 1 .save()\n",
    "unicode_before": "é = 'é'; x = 2\nwith Trace('é' + é): h = 1 .save()\n",
    "many_names": "".join(f"v{i} = {i}\n" for i in range(300)) + "with Trace() as late:\n    h = (v299 - 298).save()\n",
    "decorated": "def d(*a):\n  return lambda f: f\n@d(\n  1,\n  lambda: 2\n)\n@d()\ndef g():\n"
    "  with Trace(): k = 1 .save()\n  return k\nh = g()\n",
    "called_by_a_comprehension": "def g(x):\n  with Trace(): k = (x + 1).save()\n  return k\n"
    "h = [g(x) for x in (0, 1)][0]\n",
    "called_by_a_lambda": "def g(x):\n  with Trace(): k = (x + 1).save()\n  return k\nh = (lambda: g(0))()\n",
    "no_newline_at_the_end": "with Trace():\n    h = 1 .save()",
    "windows_line_ends": "with Trace():\r\n    h = 1 .save()\r\n",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_function", [False, True], ids=["module", "function"])
def test_layout(tmp_path: Path, layout: str, in_function: bool) -> None:
    head = "from contextlib import nullcontext as Null\nfrom harness import Trace\n"
    text = LAYOUTS[layout]
    if in_function:
        body = "".join(f"  {line}" for line in text.splitlines(keepends=True))
        text = f"def f():\n{body}\n  return h\nh = f()\n"
    (tmp_path / f"layout_{layout}_{in_function}.py").write_bytes(b"")
    module = module_from(tmp_path, f"layout_{layout}_{in_function}", head + text)
    assert module.h == 1


def test_deep_in_statements() -> None:
    out = []
    for kind in ("a", "b", "c"):
        match kind:
            case "a":
                with Trace():
                    h = (1).save()
            case "b":
                try:
                    raise KeyError
                except KeyError as error:
                    with Trace():
                        h = repr(error).save()
            case _:
                while True:
                    with Trace():
                        h = (3).save()
                    break
        out.append(h)
    assert out == [1, "KeyError()", 3]


# Not found.


def test_source_that_is_nowhere() -> None:
    code = compile(f"with Trace():\n    h = {1} .save()\n", "<nowhere>", "exec")  # a text nobody holds
    with pytest.raises(SourceError) as caught:
        exec(code, {"Trace": Trace})
    assert str(caught.value) == (
        "the source of the `with` at <nowhere>:1 can't be found. Use the function form, which needs no source: "
        "write the block as a function of the tracer and call `model.run(fn, prompt)`"
    )


def test_file_that_is_gone(tmp_path: Path) -> None:
    module = module_from(tmp_path, "gone", EDITED)
    os.remove(tmp_path / "gone.py")
    linecache.clearcache()
    with pytest.raises(SourceError, match=r"the source of the `with` at .*gone\.py:3 can't be found"):
        module.f(1)


EDITS: dict[str, Callable[[str], str]] = {
    "line_added_above": lambda text: "import os\n" + text,
    "name_changed": lambda text: text.replace("x + 1", "y + 1"),
    "constant_changed": lambda text: text.replace("x + 1", "x + 2"),
    "statement_added": lambda text: text.replace("    return h", "        k = 1\n    return h"),
    "statement_removed": lambda text: text.replace("        h = (h * 2).save()\n", ""),
    "attribute_changed": lambda text: text.replace("x.real", "x.imag"),
    "with_gone": lambda text: text.replace("with Trace() as t:", "if True:"),
}
EDITED = """\
from harness import Trace
def f(x, y=5):
    with Trace() as t:
        h = (x + 1).save()
        h = x.real + h
        h = (h * 2).save()
    return h
"""


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("rewritten", [False, True], ids=["plain", "rewritten"])
def test_file_edited_since_import(tmp_path: Path, edit: str, rewritten: bool) -> None:
    if rewritten and edit in ("name_changed", "constant_changed") and sys.version_info < (3, 11):
        pytest.skip("code has no columns")
    name = f"{'test_' if rewritten else ''}edited_{edit}_{rewritten}"
    if rewritten:
        pytest.register_assert_rewrite(name)
        text = EDITED.replace("        h = x.real", "        assert x == 1, x\n        h = x.real")
    else:
        text = EDITED
    module = module_from(tmp_path, name, text)
    file = tmp_path / f"{name}.py"
    file.write_text(EDITS[edit](text))
    os.utime(file, (1, 1))
    with pytest.raises(SourceError) as caught:
        module.f(1)
    assert str(caught.value).startswith(
        f"{file} is not what was imported any more, so the block of the `with` at {file}:"
    )
    assert "it was edited since. Import it again." in str(caught.value)
    assert "`model.run(fn, prompt)`" in str(caught.value)


def test_file_edited_elsewhere(tmp_path: Path) -> None:
    module = module_from(tmp_path, "edited_elsewhere", EDITED + "\ndef g():\n    return 1\n")
    file = tmp_path / "edited_elsewhere.py"
    file.write_text(EDITED + "\ndef g():\n    return 2\n")
    os.utime(file, (1, 1))
    assert module.f(1) == 6


def test_once_captured_an_edit_does_not_matter(tmp_path: Path) -> None:
    module = module_from(tmp_path, "captured_first", EDITED)
    assert module.f(1) == 6
    (tmp_path / "captured_first.py").write_text("")
    assert module.f(1) == 6


def test_module_reloaded_after_an_edit(tmp_path: Path) -> None:
    module = module_from(tmp_path, "reloaded", EDITED)
    assert module.f(1) == 6
    file = tmp_path / "reloaded.py"
    file.write_text(EDITED.replace("x + 1", "x + 10"))
    os.utime(file, (1, 1))
    assert module_from.__defaults__ is None
    sys.path.insert(0, str(tmp_path))
    sys.modules["reloaded"] = module
    try:
        importlib.reload(module)
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["reloaded"]
    assert module.f(1) == 24


def test_entered_by_a_call() -> None:
    from contextlib import ExitStack

    with ExitStack() as stack, pytest.raises(SourceError) as caught:
        stack.enter_context(Trace())
    assert str(caught.value).startswith("a trace has to be entered by a `with` statement, whose body")
    with pytest.raises(SourceError, match="it is entered by a call"):
        Trace().__enter__()
