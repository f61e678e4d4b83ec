"""What must hold on every Python that the library runs on. Standard library only: `python portable.py` runs it."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import tempfile
from typing import Any

if __name__ == "__main__":
    _HERE = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [_HERE, os.path.join(_HERE, "..", "..", "src")]

from harness import Trace, lines_of, raised, run_all

from insitu.block import AsyncCapturedBody

MODULE_LIST: list[int] = [1]
counter = 0


# The body does not run in the caller.


def test_body_runs_elsewhere_and_saves_are_bound() -> None:
    here = sys._getframe()
    unsaved = "before"
    with Trace() as tracer:
        frame = sys._getframe().save()
        h = (1 + 2).save()
        unsaved = "after"
    assert frame is not here
    assert (tracer, h, unsaved) == ("the target", 3, "before")


def test_body_that_begins_with_try() -> None:
    seen = []
    try:
        with Trace():
            try:
                raise ValueError
            except:  # noqa: E722
                h = (1).save()
            finally:
                k = (2).save()
    except BaseException:
        seen.append("except")
    finally:
        seen.append("finally")
    assert (h, k, seen) == (1, 2, ["finally"])


def test_bodies_of_nothing() -> None:
    with Trace() as a:
        pass
    with Trace():
        ...
    with Trace():
        """Text."""
    with Trace() as b:
        pass
    assert (a, b) == ("the target",) * 2


def test_one_line_bodies() -> None:
    with Trace():
        x = (1).save()
        y = (2).save()
    with Trace():
        z = (x + y).save()
    assert (x, y, z) == (1, 2, 3)


def test_body_that_begins_with_loop_with_and_function() -> None:
    with Trace():
        while True:
            h = (1).save()
            break
    with Trace():
        for i in range(3):
            k = i.save()
    with Trace(), open(os.devnull):
        m = (3).save()
    with Trace():

        def f() -> int:
            return 4

        n = f().save()
    assert (h, k, m, n) == (1, 2, 3, 4)
    assert "i" not in locals()


def test_trace_in_try_finally_copies() -> None:
    order = []
    try:
        try:
            raise KeyError
        finally:
            with Trace() as a:
                pass
            with Trace() as b:
                pass
            order.append((a, b))
    except KeyError:
        with Trace():
            h = (5).save()
    assert order == [("the target", "the target")]
    assert h == 5


def test_trace_in_a_loop_with_else() -> None:
    out = []
    for i in range(3):
        with Trace():
            h = (i * 2).save()
        out.append(h)
    else:
        with Trace():
            h = "else".save()
    assert (out, h) == ([0, 2, 4], "else")


def test_exception_between_is_not_swallowed() -> None:
    class Broken(Trace):
        def target(self) -> object:
            raise LookupError("in enter")

    def enter() -> None:
        with Broken():
            raise AssertionError("body")

    assert repr(raised(enter)) == "LookupError('in enter')"
    assert sys.gettrace() is None


# Targets.


def test_targets() -> None:
    class Thing:
        pass

    thing, array = Thing(), [0, 0]
    with Trace((1, (2, 3))) as (a, [b, c]):
        pass
    with Trace(4) as thing.x:
        pass
    with Trace(5) as array[1]:
        pass
    with Trace([6, 7, 8]) as (first, *rest):
        pass
    assert (a, b, c, thing.x, array, first, rest) == (1, 2, 3, 4, [0, 5], 6, [7, 8])


def test_target_that_does_not_fit() -> None:
    def enter() -> None:
        with Trace((1, 2, 3)) as (a, b):
            pass

    assert str(raised(enter)) == "too many values to unpack (expected 2)" or sys.version_info >= (3, 14)


def test_several_items() -> None:
    from contextlib import contextmanager

    log = []

    @contextmanager
    def noted(name: str):
        log.append(f"enter {name}")
        yield name
        log.append(f"leave {name}")

    with noted("outer") as outer, Trace() as tracer, noted("inner") as inner:
        log.append("body")
        got = (inner, tracer, outer).save()
    assert got == ("inner", "the target", "outer")
    assert log == ["enter outer", "enter inner", "leave inner", "leave outer"]  # "body" went to a copy
    assert "inner" not in locals()


# Scopes.


def test_closures_and_cells() -> None:
    base = 10

    def inner() -> int:
        nonlocal base
        with Trace():
            base = (base + 1).save()
        return base

    def reader() -> int:
        return base

    assert (inner(), base, reader()) == (11, 11, 11)


def test_cell_variable_of_own_function() -> None:
    value = 1
    get = lambda: value  # noqa: E731
    with Trace():
        value = (value + 1).save()
    assert (value, get()) == (2, 2)


def test_global_names() -> None:
    global counter
    counter = 5
    with Trace():
        counter = (counter + 1).save()
    assert counter == 6
    assert globals()["counter"] == 6


def test_unbound_local_is_no_global() -> None:
    def enter() -> None:
        with Trace():
            x = (counter_local + 1).save()  # noqa: F821
        counter_local = 1

    globals()["counter_local"] = 7
    error = raised(enter)
    del globals()["counter_local"]
    assert repr(error) == """NameError("name 'counter_local' is not defined")"""


def test_class_body_and_enclosing_function() -> None:
    around = 3

    class Thing:
        own = 4
        with Trace() as tracer:
            total = (around + own + len(MODULE_LIST)).save()

    assert (Thing.total, Thing.tracer) == (8, "the target")


def test_generator_and_coroutine_frames() -> None:
    def generate():
        for i in range(2):
            with Trace():
                h = (i + 1).save()
            yield h

    async def coroutine() -> int:
        with Trace():
            h = (9).save()
        return h

    def drive() -> int:
        try:
            coroutine_object.send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError

    coroutine_object = coroutine()
    assert list(generate()) == [1, 2]
    assert drive() == 9


def test_method_private_names_and_super() -> None:
    class Base:
        def value(self) -> int:
            return 1

    class Derived(Base):
        def __init__(self) -> None:
            self.__secret = 5

        def value(self) -> int:
            with Trace():
                __local = 100
                r = (super().value() + self.__secret + __local).save()
                s = (lambda me: super().value())(self).save()
            assert s == 1
            return r

    assert Derived().value() == 106


def test_comprehensions_lambdas_and_nested_functions() -> None:
    n = 3

    def get(i: int) -> int:
        return i + n

    with Trace():
        k = 10
        a = [get(i) + k for i in range(2)].save()
        b = (lambda x: x * k)(2).save()

        def f(x: int) -> int:
            def g() -> int:
                nonlocal x
                x += k
                return x

            return g()

        class C:
            y = k + 1

            def m(self) -> int:
                return k

        c = f(1).save()
        d = (C.y, C().m()).save()
        total = sum((last := v) for v in a).save()
        last.save()
    assert (a, b, c, d, total, last) == ([13, 14], 20, 11, (11, 10), 27, 14)


def test_nonlocal_and_global_mean_the_blocks_own() -> None:
    x = 1
    with Trace():
        nonlocal_count = 0

        def bump() -> None:
            global nonlocal_count
            nonlocal_count += 1

        bump()
        y = (nonlocal_count, x).save()
    assert y == (1, 1)
    assert "nonlocal_count" not in globals()


def test_inlined_comprehension_names() -> None:
    squares = [counter * counter for counter in range(3)]
    with Trace():
        got = (counter, len(squares)).save()
    assert got == (globals()["counter"], 3)


# Errors.


def test_error_shows_the_users_lines_only() -> None:
    def enter() -> None:
        with Trace():
            a = 1
            b = a / 0  # the line

    error = raised(enter)
    assert isinstance(error, ZeroDivisionError)
    assert error.__context__ is None
    assert lines_of(error)[1:] == [("enter", "with Trace():"), ("enter", "b = a / 0  # the line")]


def test_error_in_a_helper_and_its_context() -> None:
    def helper() -> None:
        raise ValueError("inner")

    def enter() -> None:
        with Trace():
            try:
                helper()
            except ValueError:
                raise KeyError("outer")  # noqa: B904

    error = raised(enter)
    assert isinstance(error, KeyError)
    assert repr(error.__context__) == "ValueError('inner')"
    assert error.__context__ is not None
    assert [name for name, _ in lines_of(error)] == ["raised", "enter", "enter"]
    assert [name for name, _ in lines_of(error.__context__)] == ["enter", "helper"]


def test_error_that_is_no_exception() -> None:
    def enter(kind: type[BaseException]) -> None:
        with Trace():
            raise kind

    for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration):
        assert type(raised(enter, kind)) is kind


def test_error_inside_except_has_its_context() -> None:
    def enter() -> None:
        try:
            raise LookupError("before")
        except LookupError:
            with Trace():
                raise ValueError("in block")  # noqa: B904

    assert repr(raised(enter).__context__) == "LookupError('before')"


def test_error_with_cause() -> None:
    cause = TypeError("the cause")

    def enter() -> None:
        with Trace():
            raise ValueError from cause

    error = raised(enter)
    assert error.__cause__ is cause
    assert error.__suppress_context__


def test_frames_are_not_kept() -> None:
    import gc
    import weakref

    class Thing:
        pass

    def enter(fail: bool) -> weakref.ref[Thing]:
        thing = Thing()
        try:
            with Trace() as tracer:
                kept = thing.save()
                if fail:
                    raise ValueError
        except ValueError:
            pass
        return weakref.ref(thing)

    gc.disable()
    try:
        assert enter(False)() is None
        assert enter(True)() is None
    finally:
        gc.enable()


# Tracing of others.


def test_tracing_of_others_is_given_back() -> None:
    events = []

    def local(frame, event, arg):
        events.append((event, frame.f_lineno - first))
        return local

    def tracer(frame, event, arg):
        return local if frame.f_code is traced.__code__ else None

    def traced() -> int:
        with Trace():
            h = (1).save()
        return h

    first = traced.__code__.co_firstlineno
    sys.settrace(tracer)
    try:
        traced()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    assert ("line", 3) in events
    assert events[-1][0] == "return"
    assert all(event != "opcode" for event, _ in events)


def test_tracer_that_counts_calls_and_returns() -> None:
    class Counter:
        depth = 0
        lines = 0

        def __call__(self, frame, event, arg):
            self.depth += {"call": 1, "return": -1}.get(event, 0)
            self.lines += event == "line" and frame.f_code is traced.__code__
            return self

    def traced() -> int:
        for _ in range(3):
            with Trace():
                h = (1).save()
        return h

    counter = Counter()
    sys.settrace(counter)
    traced()
    sys.settrace(None)
    assert counter.depth == 0
    assert counter.lines >= 8


def test_recursion_and_threads() -> None:
    import threading

    def recurse(depth: int) -> int:
        if depth == 0:
            return 0
        below = recurse(depth - 1)
        with Trace():
            h = (below + 1).save()
        return h

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(recurse(30))) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == [30] * 8


class AsyncTrace(AsyncCapturedBody):
    def __init__(self) -> None:
        self._trace = Trace()

    def target(self) -> str:
        return "async"

    async def run_block_async(self, site: Any) -> BaseException | None:
        await Pause()
        return self._trace.run_block(site)


class Pause:
    def __await__(self):
        yield "pause"


def drive(coroutine: Any) -> tuple[list[Any], Any]:
    """What a coroutine yields, and what it returns."""
    yielded = []
    try:
        while True:
            yielded.append(coroutine.send(None))
    except StopIteration as stop:
        return yielded, stop.value


def test_async_with() -> None:
    async def enter() -> tuple[Any, ...]:
        with open(os.devnull):
            try:
                async with AsyncTrace() as tracer:
                    h = (1).save()
                async with AsyncTrace():
                    try:
                        k = (2).save()
                    except:  # noqa: E722
                        k = 0
                async with Pausing():
                    async with AsyncTrace() as (a, *b):
                        pass
            finally:
                async with AsyncTrace():
                    m = (3).save()
        return tracer, h, k, a, b, m

    class Pausing:
        async def __aenter__(self) -> None:
            await Pause()

        async def __aexit__(self, *_: object) -> None:
            await Pause()

    assert drive(enter()) == (["pause"] * 6, ("async", 1, 2, "a", ["s", "y", "n", "c"], 3))


def test_error_of_an_async_with() -> None:
    async def enter() -> None:
        async with AsyncTrace():
            h = 1
            h / 0  # the line

    async def refused() -> None:
        async with AsyncTrace():
            await Pause()

    error = raised(drive, enter())
    assert lines_of(error)[2:] == [("enter", "async with AsyncTrace():"), ("enter", "h / 0  # the line")]
    assert error.__context__ is None
    assert "`await` can't be in a trace block" in str(raised(drive, refused()))


def test_nested_trace_in_a_block() -> None:
    with Trace():
        rows = []
        for i in range(2):
            with Trace(i) as inner:
                h = (i + inner).save()
            rows.append(h)
        out = rows.save()

        def later() -> int:
            with Trace():
                k = (7).save()
            return k

        seven = later().save()
    assert (out, seven) == ([0, 2], 7)


# Sources.

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
PRINTED = "15 7 the target"


def python(*arguments: str, text: str | None = None, file: Any = None) -> tuple[str, str]:
    folders = [os.path.dirname(sys.modules["harness"].__file__ or ""), *sys.path]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        **({"input": text} if text is not None else {"stdin": file}),
    )
    return done.stdout.strip(), done.stderr.strip()


def test_sources_of_a_whole_program() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "script.py")
        with open(path, "w") as file:
            file.write(SCRIPT)
        assert python(path) == (PRINTED, "")
        with open(path) as file:
            assert python(file=file) == (PRINTED, "")
    assert python("-c", SCRIPT) == (PRINTED, "")
    assert python("-c", "exec(" + repr(SCRIPT) + ")") == (PRINTED, "")


def test_interactive_interpreter() -> None:
    output, errors = python("-i", "-q", text=SCRIPT)
    if sys.version_info >= (3, 13):
        assert PRINTED in output, errors
    else:
        assert "SourceError: the source of the `with` at <stdin>:1 can't be found" in errors


def test_file_edited_since_import() -> None:
    import importlib

    for number, (old, new) in enumerate(
        [
            ("x * factor", "x + factor"),
            ("factor = 3", "factor = 3\n"),
            ("as t:", "as u:"),
            ("h = ", "h = 1\n        h = "),
        ]
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"edited{number}.py")
            with open(path, "w") as file:
                file.write(SCRIPT.replace("print(f(5), g, t)", ""))
            sys.path.insert(0, folder)
            importlib.invalidate_caches()
            module = importlib.import_module(f"edited{number}")
            sys.path.remove(folder)
            module.f.__code__ = module.f.__code__.replace()  # not yet captured
            assert module.f(1) == 3
            module.f.__code__ = module.f.__code__.replace()
            with open(path, "w") as file:
                file.write(SCRIPT.replace("print(f(5), g, t)", "").replace(old, new))
            os.utime(path, (1, 1))
            error = raised(module.f, 1)
            assert type(error).__name__ == "SourceError", (number, error)
            assert "it was edited since" in str(error)


def test_every_way_to_skip() -> None:
    from insitu.block import monitored

    if sys.version_info < (3, 12):
        return
    available = monitored.available
    monitored.available = lambda: False
    try:
        for test in (
            test_body_that_begins_with_try,
            test_bodies_of_nothing,
            test_trace_in_try_finally_copies,
            test_generator_and_coroutine_frames,
            test_async_with,
            test_tracing_of_others_is_given_back,
            test_frames_are_not_kept,
        ):
            test()
    finally:
        monitored.available = available


def test_with_of_another_manager_before() -> None:
    from contextlib import nullcontext

    seen = []
    for manager in (nullcontext(), Trace(), nullcontext(), Trace()):
        with Trace():
            h = (1).save()
        with manager as value:
            seen.append("native")
            k = (h + 1).save() if isinstance(value, str) else 0
    assert (seen, k) == (["native", "native"], 2)


def test_saves_keep_nothing_alive() -> None:
    import gc
    import weakref

    class Tensor:
        pass

    seen: list[Any] = []

    def make() -> list[Any]:
        tensor = Tensor()
        seen.append(weakref.ref(tensor))
        return [tensor]

    def alive() -> int:
        return sum(ref() is not None for ref in seen)

    gc.disable()
    try:
        with Trace():
            first = None
            for _ in range(10):
                h = make()[0].save()
                if first is None:
                    first = h
            one = alive().save()
            for _ in range(10):
                k = make().save()
            two = alive().save()
    finally:
        gc.enable()
    assert (one, two) == (2, 3)
    assert first is not h
    assert isinstance(first, Tensor)
    assert len(k) == 1


# Blocks as data.


def test_pickled_block() -> None:
    import pickle

    from insitu.block import Saves

    trace = Trace()
    n = 2
    with trace:
        h = [i * n for i in range(3)].save()
    block = trace.block
    again = pickle.loads(pickle.dumps(block))
    saves = Saves()
    namespace = again.run({"n": 5}, saves, "elsewhere")
    assert saves.collect(namespace, again.binds) == {"h": [0, 5, 10]}
    assert (again.digest, again) == (block.digest, block)
    assert (block.reads - {"range"}, block.binds) == ({"n"}, {"h"})
    assert (again.filename, again.lineno, again.qualname) == (block.filename, block.lineno, block.qualname)
    if sys.version_info >= (3, 11):
        assert block.qualname == "test_pickled_block"
    assert h == [0, 2, 4]


def test_digests() -> None:
    blocks = []
    for _ in range(2):
        trace = Trace()
        with trace:
            pass
        blocks.append(trace.block)
    trace = Trace()
    with trace:
        pass
    assert blocks[0] is blocks[1]
    assert trace.block != blocks[0]
    assert trace.block.digest != blocks[0].digest
    assert len({*blocks, trace.block}) == 2


def test_long_chains() -> None:
    lines = ["with Trace():", "    if n == -1: h = 0"]
    lines += [f"    elif n == {i}: h = ({' + '.join(['1'] * 150)}).save()" for i in range(120)]
    text = "\n".join(lines)
    linecache.cache["<chains>"] = (len(text), None, text.splitlines(keepends=True), "<chains>")
    namespace = {"Trace": Trace, "n": 119}
    exec(compile(text, "<chains>", "exec"), namespace)
    assert namespace["h"] == 150


def test_annotations_are_not_evaluated() -> None:
    with Trace():
        h: NoSuchName = (1).save()  # noqa: F821
        k: NoSuchName  # noqa: F821, F842
        import dataclasses

        @dataclasses.dataclass
        class Point:
            x: int = 1

        p = Point().x.save()
    assert (h, p) == (1, 1)


# Layouts: `h` is 1 at the end of each.

LAYOUTS = {
    "parentheses": "with (Trace(\n    )\n):\n    h = 1 .save()\n",
    "parentheses_as": "with (\n    Trace(\n    ) as t,\n):\n    h = 1 .save()\n",
    "two_in_parentheses": "with (\n  Trace() as u,\n  Null() as n\n):\n    h = 1 .save()\n",
    "second_in_parentheses": "with (\n  Null(2) as u,\n  Trace() as n\n):\n    h = (u - 1).save()\n",
    "third_on_one_line": "with Null(2) as u, Null(u) as v, Trace(): h = (v - 1).save()\n",
    "backslash": "with \\\n  Trace() \\\n    as t:\n    h = 1 .save()\n",
    "one_line": "if 1:\n with Trace(): h = 1 .save(); k = 2\n",
    "semicolons": "x = 1; y = 2\nwith Trace(): h = 1 .save(); k = h; m = k\n",
    "one_liners_in_a_row": "with Trace(): a = 1 .save()\nwith Trace(): h = a.save()\n",
    "comment_after_colon": "with Trace():  # comment\n    # comment\n\n    h = 1 .save()  # comment\n# end\n",
    "comment_in_the_first_column": "with Trace():\n# comment\n    h = 1 .save()\n# comment\n    k = 2\n",
    "lines_in_the_head": "with Trace(\n  (lambda: 1)(\n  )\n) as h:\n    h = h.save()\n",
    "text_in_the_first_column": "with Trace():\n    h = '''\n\nx'''.count('x').save()\n",
    "unicode_before": "é = 'é'; x = 2\nwith Trace('é' + é): h = 1 .save()\n",
    "many_names": "".join(f"v{i} = {i}\n" for i in range(300)) + "with Trace() as z:\n    h = (v299 - 298).save()\n",
    "long_body": "with Trace() as z:\n" + "    h = 1 .save()\n" * 300,
    "long_after": "with Trace() as z:\n    h = 1 .save()\n" + "k = h * 2 + 1\n" * 300,
    "global_statement": "with Trace() as z:\n    h = 1 .save()\nif h != 1:\n    raise ValueError\n",
}


def test_layouts() -> None:
    from contextlib import nullcontext

    def texts() -> Any:
        for name, text in LAYOUTS.items():
            yield name, text
            body = "".join(f"  {line}" for line in text.splitlines(keepends=True))
            yield f"{name} in a function", f"def f():\n{body}\n  return h\nh = f()\n"
            yield f"{name} in a class", f"class C:\n{body}\nh = C.h\n"
            again = "def f():\n for i in range(2):\n  try: pass\n  finally:\n   if i == 1:\n"
            again += "".join(f"    {line}" for line in text.splitlines(keepends=True)) + "\n return h\nh = f()\n"
            yield f"{name} in a finally in a loop", again

    for number, (name, text) in enumerate(texts()):
        filename = f"<layout {number}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        namespace = {"Trace": Trace, "Null": nullcontext, "__name__": "layout"}
        if "head" in name and "class" not in name:
            namespace["Trace"] = lambda *a: Trace(*a)
        try:
            exec(compile(text, filename, "exec"), namespace)
        except Exception as error:
            raise AssertionError(name) from error
        assert namespace["h"] == 1, name


if __name__ == "__main__":
    sys.exit(bool(run_all(globals())))
