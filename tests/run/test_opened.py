"""A function with stops in it computes what it did, and hands each operation over by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from insitu.block import LocationError
from insitu.run.mentions import mentions
from insitu.run.opened import opened
from tests.run import forwards


def helper(x: int, y: int) -> int:
    return x - y


class Base:
    def forward(self, x: int, *, k: int = 2) -> int:
        return x * k


class Everything(Base):
    def forward(self, x: int, y: int = 3, /, *rest: int, z: int = 4, **named: int) -> Any:
        """What is in it is left as it is, here helper(1, 2)."""
        above = super().forward(x, k=z)
        each = [helper(i, y) for i in range(3)]
        total = self.__own(above) + sum(each)
        total += len({**named})
        for _ in range(2):
            total = total * 2
        later = lambda: helper(total, 1)  # noqa: E731
        spread: list[int] = list(rest)
        text = f"{helper(1, 2)}" + "!" if spread else "%d" % total  # noqa: UP031
        return total, later(), spread, text

    def __own(self, value: int) -> int:
        return value // 1


class Keyed:
    def __call__(self, x: int, *, by: int = 2) -> int:
        return helper(x, by) @ Matrix()


class Matrix:
    def __rmatmul__(self, x: int) -> int:
        return x + 100


def closing(offset: int) -> Any:
    class Closing:
        factor = 3

        def forward(self, x: int) -> int:
            return helper(x, offset) * __class__.factor  # pyright: ignore[reportUndefinedVariable]

    return Closing()


def stopped(called: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """What it returns with stops in it, and the operations it came by."""
    seen: list[str] = []

    def stop(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return function(*args, **kwargs)

    return opened(called, "it").stopping(stop)(*args, **kwargs), seen


def test_everything_that_a_function_may_hold() -> None:
    forward = Everything().forward
    value, seen = stopped(forward, 5, 7, 1, z=9, w=1)
    assert value == forward(5, 7, 1, z=9, w=1)
    assert stopped(forward, 5)[0] == forward(5)
    assert seen == [
        "super_forward_0",
        "range_0",
        *["helper_0"] * 3,
        "self___own_0",
        "sum_0",
        "add_0",
        "len_0",
        "add_1",
        "range_1",
        *["mul_0"] * 2,
        "list_0",
        "later_0",
    ]
    assert [each.name for each in opened(forward, "it").text.listing.operations if each.loops] == ["helper_0", "mul_0"]


def test_objects_that_can_be_called_closures_and_the_class_around() -> None:
    assert stopped(Keyed(), 5) == (103, ["helper_0", "Matrix_0", "matmul_0"])
    assert stopped(closing(4).forward, 10) == (18, ["helper_0", "mul_0"])


def test_what_an_operation_calls() -> None:
    found = opened(Everything().forward, "it")
    assert found.callee("helper_0") is helper
    assert found.callee("self___own_0").__func__ is Everything._Everything__own
    assert found.callee("sum_0") is sum
    with pytest.raises(LookupError):
        found.callee("later_0")


CALLED = [len, int, functools.partial(helper, 1), "text".join]


@pytest.mark.parametrize("called", CALLED, ids=lambda each: type(each).__name__)
def test_what_is_not_python_is_refused(called: Any) -> None:
    with pytest.raises(LocationError, match="it is not written in Python"):
        opened(called, "it")


def test_whether_a_block_names_source() -> None:
    model: Any = None
    assert "source" in mentions(lambda: model.layer.source.add_0.output)
    assert "source" in mentions(lambda: [model.layer.source for _ in range(2)])
    assert "source" in mentions(lambda: reading(model))
    assert "source" in mentions(functools.partial(reading, model))
    assert "source" in mentions(lambda: forwards.reading(model))
    assert "source" not in mentions(lambda: model.layer.output)
    assert "source" not in mentions(lambda: helper(1, 2))


def reading(model: Any) -> Any:
    return forwards.reading(model)
