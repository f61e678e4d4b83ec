"""No escape of those known gets out, and no block takes more than its limits."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from insitu.guard import GuardLimits, LimitError, NotAllowedError
from insitu.guard.allowed import Allowed
from insitu.net import WireError
from tests.guard.escapes import ESCAPES, LIMITS
from tests.guard.running import run

# These are refused as an error of Python's own: there is nothing by which they could do harm.
PYTHONS_OWN = {
    "type-alias": NotAllowedError,
    "encode-codec": ValueError,
    "decode-codec": ValueError,
    "torch-view-bool": TypeError,
    "error-as-index": NotAllowedError,
    "key-complex": TypeError,
}


class ReachedError(BaseException):
    """Nothing in a block catches it."""


def reached(value: Any) -> None:
    if value is not None:
        raise ReachedError(repr(value))


def test_there_are_enough_of_them() -> None:
    assert len(ESCAPES) >= 150
    assert len(LIMITS) >= 60


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_refused(name: str) -> None:
    ran: list[str] = []
    text = f"start()\n{ESCAPES[name]}\nreached('the end')"
    values = {"start": Allowed(lambda: ran.append("started"), "start"), "reached": Allowed(reached, "reached")}
    try:
        run(f"def f(): pass\n{text}", **values)
    except (NotAllowedError, WireError):
        assert name not in PYTHONS_OWN or PYTHONS_OWN[name] is NotAllowedError
    except (ValueError, TypeError, NameError) as error:
        assert type(error) is PYTHONS_OWN.get(name), error
    except ReachedError as error:
        assert "getattr-default" in name or "hasattr" in name, error
        assert str(error) == "'the end'"  # what was asked for was not found
    else:
        pytest.fail("it ran to its end")


@pytest.mark.parametrize("name", LIMITS)
def test_a_block_is_stopped_at_its_limits(name: str) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    limits = GuardLimits(operations=100_000, seconds=10, live_bytes=200 << 20, value_bytes=100 << 20)
    with pytest.raises(LimitError, match="this block was stopped"):
        run(LIMITS[name], limits)
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10


def test_seconds_are_a_limit() -> None:
    with pytest.raises(LimitError, match=r"it has run for 0\.2 seconds"):
        run("while True: pass", GuardLimits(seconds=0.2, operations=10**9))


@pytest.mark.parametrize("exit", ["return", "break", "continue"])
def test_no_exit_out_of_a_finally_which_would_swallow_a_limit(exit: str) -> None:
    text = f"def g():\n    for i in [1]:\n        try:\n            pass\n        finally:\n            {exit}\n"
    with pytest.raises(NotAllowedError, match=f"`{exit}` can't be in a `finally`"):
        run(text)


@pytest.mark.parametrize("kind", ["BaseException", "(ValueError, BaseException)", "torch", "1"])
def test_a_limit_cannot_be_caught(kind: str) -> None:
    with pytest.raises(NotAllowedError):
        run(f"try:\n    1 / 0\nexcept {kind}:\n    pass")


def test_keys_nested_too_deeply_would_end_the_process() -> None:
    with pytest.raises(NotAllowedError, match="nested more than 100 deep"):
        run("x = ()\nfor i in range(50000): x = (x,)\n{x: 1}")


@pytest.mark.parametrize("name", ["_getattr_", "__builtins__", "_runtime_", "__name__"])
def test_values_cannot_take_the_place_of_the_guards(name: str) -> None:
    with pytest.raises(NotAllowedError, match="may begin with an underscore"):
        run("x = 1", **{name: {}})


@pytest.mark.parametrize("call", ["round(1.0, s)", "getattr(1, s)", "hasattr(1, s)", "format(1, s)"])
def test_a_shared_list_is_not_written_into_a_message(call: str) -> None:
    with pytest.raises(TypeError):
        run(f"s = [1]\nfor i in range(60): s = [s, s]\n{call}")


def test_time_is_looked_at_before_each_long_operation() -> None:
    start = time.monotonic()
    with pytest.raises(LimitError, match=r"it has run for 0\.2 seconds"):
        run("x = torch.ones(1500, 1500)\nwhile True: x @ x", GuardLimits(seconds=0.2))
    assert time.monotonic() - start < 20
