"""What of a traceback the user sees."""

from __future__ import annotations

import builtins
import linecache
import subprocess
import sys
import traceback

import pytest

from insitu.block import BlockSyntaxError, Site, SourceError, user_traceback
from insitu.block.tracebacks import is_library_file, set_traceback

from .test_portable import load
from .test_sources import ENVIRONMENT

harness = load("harness")
Trace, lines_of = harness.Trace, harness.lines_of

PROGRAM = """\
from harness import Trace
def helper(x):
    return x / 0
def f():
    with Trace():
        a = 1
        b = helper(a)
f()
"""


def uncaught(text: str, tmp_path, **environment: str) -> str:
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
    )
    lines = [line for line in done.stderr.splitlines() if not set(line) <= set(" ~^")]
    return "\n".join(lines).replace(str(tmp_path), "")


def test_uncaught_error_as_python_prints_it(tmp_path) -> None:
    assert uncaught(PROGRAM, tmp_path) == (
        "Traceback (most recent call last):\n"
        '  File "/program.py", line 8, in <module>\n    f()\n'
        '  File "/program.py", line 5, in f\n    with Trace():\n'
        '  File "/program.py", line 7, in f\n    b = helper(a)\n'
        '  File "/program.py", line 3, in helper\n    return x / 0\n'
        "ZeroDivisionError: division by zero"
    )


def test_library_frames_when_asked_for(tmp_path) -> None:
    shown = uncaught(PROGRAM, tmp_path, INSITU_DEBUG="1")
    assert "block/block.py" in shown
    assert shown.endswith("ZeroDivisionError: division by zero")


# A bare `raise` of Python 3.10 keeps the frame that caught an error.
shows_all = pytest.mark.skipif(sys.version_info < (3, 11), reason="the frame of `__enter__` shows")


@shows_all
def test_uncaught_refusal_points_at_the_line(tmp_path) -> None:
    shown = uncaught(PROGRAM.replace("b = helper(a)", "return 3"), tmp_path)
    assert "insitu/block" not in shown
    assert '  File "/program.py", line 5, in f\n    with Trace():\n  File "/program.py", line 7\n    return 3' in shown
    assert shown.endswith("save what you need and return it after the `with`")


@shows_all
def test_source_error_shows_the_callers_frame_alone() -> None:
    code = compile("\n".join(["", "with Trace():", "    h = 1", ""]), "<nowhere at all>", "exec")
    with pytest.raises(SourceError) as caught:
        exec(code, {"Trace": Trace})
    assert [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)][1:] == ["<module>"]


def test_refusal_is_a_syntax_error_with_its_place() -> None:
    with pytest.raises(BlockSyntaxError) as caught:
        with Trace():
            return  # the line
    assert caught.value.filename == __file__
    assert caught.value.lineno is not None
    assert linecache.getline(__file__, caught.value.lineno).strip() == "return  # the line"


def test_native_errors_between_enter_and_exit_are_left_alone() -> None:
    class Late(Trace):
        def __enter__(self) -> object:
            super().__enter__()
            raise AssertionError

    # `__enter__` of a subclass is one frame further away: it is found to be no `with` of its own.
    with pytest.raises(SourceError, match="it is entered by a call"):
        with Late():
            pass


def test_exceptions_that_are_not_the_skip_go_on() -> None:
    class Manager:
        def __enter__(self) -> None:
            self.site = Site.here()

        def __exit__(self, kind: object, error: BaseException | None, tb: object) -> bool:
            self.left = "never armed"
            return False

    manager = Manager()
    with pytest.raises(LookupError, match="native"):
        with manager:
            raise LookupError("native")
    assert manager.left == "never armed"


def test_set_traceback_keeps_cause_and_notes() -> None:
    error, cause = ValueError("x"), KeyError("y")
    try:
        raise error from cause
    except ValueError as raised:
        set_traceback(raised, user_traceback(raised), None)
        assert raised.__cause__ is cause
        assert raised.__context__ is None
    assert user_traceback(ValueError()) is None


def test_library_files() -> None:
    assert is_library_file(user_traceback.__code__.co_filename)
    assert not is_library_file(__file__)
    assert not is_library_file(traceback.__file__)


def test_one_manager_used_again_and_inside_itself() -> None:
    trace = Trace()
    with trace:
        a = (1).save()
    with trace:
        b = (2).save()
    assert (a, b) == (1, 2)
    for i in range(2):
        with pytest.raises(ZeroDivisionError):
            with trace:
                c = i / 0
        with trace:
            c = i.save()
    assert c == 1


def test_groups_pass() -> None:
    group = getattr(builtins, "ExceptionGroup", None)
    if group is None:
        pytest.skip("no exception groups")
    with pytest.raises(group) as caught:
        with Trace():
            raise group("two", [ValueError("a"), KeyError("b")])
    assert [type(each) for each in caught.value.exceptions] == [ValueError, KeyError]
