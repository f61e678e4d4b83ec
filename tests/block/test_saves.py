"""What is saved, and under which name it comes back."""

from __future__ import annotations

import contextvars
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import insitu.block
from insitu.block import ArgumentError, OutsideTraceError, Saves, current_saves, save

from .test_portable import load

Trace = load("harness").Trace


def helper(value: Any) -> Any:
    return save(value)


def test_value_at_the_end_of_the_block() -> None:
    with Trace():
        rows = [].save()
        rows.append(1)
        total = (0).save()
        total += 5
        rows.append(total)
    assert (rows, total) == ([1, 5], 5)


def test_container_of_the_caller_is_copied_until_it_is_saved() -> None:
    rows, kept, given = [1], [[1]], {"a": [1]}
    alias, inner = kept, given["a"]
    trace = Trace()
    with trace:
        rows.append(2)
        kept[0].append(2)
        given["a"].append(2)
        kept.save()
    assert (rows, kept, given, alias, inner) == ([1], [[1, 2]], {"a": [1]}, [[1]], [1])
    assert sorted(trace.changed) == ["given", "rows"]


def test_saved_in_a_helper() -> None:
    thing, other = object(), object()
    with Trace():
        a = helper(thing)
        b = thing
        c = other
        d = [helper(other)]
    assert (a, b, c) == (thing, thing, other)
    assert "d" not in locals()


def test_scalars_are_saved_by_name_only() -> None:
    c = "before"
    with Trace():
        a = (1).save()
        b = 1
        c = 0 + 1
    assert (a, c) == (1, "before")
    assert "b" not in locals()


@pytest.mark.parametrize("value", [5, "x", None, True, 2.5])
def test_a_scalar_can_t_be_saved_without_a_name(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"Write `name = x\.save\(\)` in the block's own text"):
        with Trace():
            kept = save(value)


def test_insitu_save_does_not_call_a_value_s_own_save() -> None:
    class Config:
        def save(self) -> None:
            raise AssertionError("not this")

    with Trace():
        kept = save(Config())
    assert isinstance(kept, Config)


def test_deleted_and_unbound_names() -> None:
    a = "before"
    trace = Trace()
    with trace:
        a = [1].save()
        b = a
        del a
    assert trace.saved == {"b": [1]}
    assert (a, b) == ("before", [1])  # noqa: F821


def test_saved_before_an_error_is_bound() -> None:
    with pytest.raises(ValueError, match="late"):
        with Trace():
            a = [1].save()
            b = (2).save()
            raise ValueError("late")
    assert (a, b) == ([1], 2)


def test_own_save_methods_are_called() -> None:
    class Figure:
        def __init__(self) -> None:
            self.saved = 0

        def save(self) -> str:
            self.saved += 1
            return "saved"

    figure, module = Figure(), ModuleType("module")
    module.save = lambda: "module"  # type: ignore[attr-defined]
    space = SimpleNamespace(save=lambda: "space")
    trace = Trace()
    with trace:
        results = (figure.save(), module.save(), space.save(), Figure.save).save()
    assert results[:3] == ("saved", "module", "space")
    assert figure.saved == 1
    assert list(trace.saved) == ["results"]


def test_saving_a_class_without_save_and_one_of_the_library() -> None:
    class Plain:
        pass

    class Ours:
        def save(self) -> None:
            raise AssertionError("called")

    Ours.save.__module__ = "insitu.run.cache"
    with Trace():
        a = Plain.save()
        b = Ours().save()
    assert a is Plain
    assert type(b) is Ours


def test_outside_a_block() -> None:
    with pytest.raises(OutsideTraceError, match=r"insitu\.save\(x\) was called where no trace block is running"):
        save(1)
    assert current_saves.get() is None


def test_active() -> None:
    saves = Saves()
    with saves.active():
        thing = save(object())
    assert thing in saves
    assert object() not in saves
    assert saves.collect({"a": thing, "b": 1}, {"a", "b", "c"}) == {"a": thing}
    with pytest.raises(OutsideTraceError):
        save(1)


def test_current_saves_in_nested_blocks() -> None:
    outer = Trace()
    with outer:
        a = helper([1])
        with Trace():
            b = helper([2])
        c = helper([3])
    assert (a, c) == ([1], [3])
    assert sorted(outer.saved) == ["a", "c"]
    assert "b" not in locals()


def test_other_contexts_do_not_see_it() -> None:
    with Trace():
        seen = contextvars.Context().run(insitu.block.current_saves.get).save()
    assert seen is None


def test_marked_objects_are_held() -> None:
    saves = Saves()
    for number in range(100):
        saves.mark([number])
    assert not any([number] in saves for number in range(100))
    assert saves.mark(5, "a", "b") == 5
    assert saves.names == ("a", "b")
    assert saves.collect({"b": 6}, ()) == {"b": 6}


def test_the_parts_of_a_saved_value_that_is_unpacked_are_saved() -> None:
    trace = Trace()
    with trace:
        a, (b, *c) = (1, [2, 3, 4]).save()
        d, e = x, y = ([5], [6]).save()
    assert trace.saved == {"a": 1, "b": 2, "c": [3, 4], "d": [5], "e": [6], "x": [5], "y": [6]}
    assert (a, b, c, d, e, x, y) == (1, 2, [3, 4], [5], [6], [5], [6])
