"""The caller's variables."""

from __future__ import annotations

import sys
from enum import Enum
from types import FrameType
from typing import Any

import pytest

from insitu.block import Scope, SourceError
from insitu.block.containers import changed

module_name_ = "a global"


def here() -> Scope:
    frame: FrameType = sys._getframe(1)
    return Scope(frame)


def test_values_of_a_function() -> None:
    local = 1
    cell = 2

    def inner() -> tuple[dict[str, Any], int]:
        own = 3
        return here().values(["local", "cell", "own", "module_name_", "print", "nothing", "late"]), cell

    values, _ = inner()
    assert values == {"cell": 2, "own": 3, "module_name_": "a global"}
    assert here().values(["local", "inner"]) == {"local": local, "inner": inner}
    if local == 2:
        late = 1
    assert here().values(["late"]) == {}


def test_binding_touches_no_other_name() -> None:
    a, b = 1, 2
    scope = here()
    b = 3
    scope.bind({"a": 10})
    assert (a, b) == (10, 3)
    scope.bind({})
    c = lambda: b  # noqa: E731
    scope.bind({"b": 20})
    assert (a, b, c()) == (10, 20, 20)
    assert scope.values(["a", "b"]) == {"a": 10, "b": 20}


def test_binding_a_name_that_has_no_value_yet() -> None:
    scope = here()
    scope.bind({"later": 1, "cell": 2})
    if scope is None:
        later = cell = 0
    get = lambda: cell  # noqa: E731
    assert (later, get()) == (1, 2)


def test_binding_a_free_variable_is_seen_by_all_who_share_it() -> None:
    shared = 1

    def writer() -> None:
        nonlocal shared
        here().bind({"shared": shared + 1})

    writer()
    assert shared == 2


def test_binding_a_global() -> None:
    def writer() -> None:
        global bound_by_a_test
        here().bind({"bound_by_a_test": 1})
        if bound_by_a_test == 2:
            bound_by_a_test = 3

    writer()
    assert globals().pop("bound_by_a_test") == 1


def test_binding_a_name_of_nobody() -> None:
    with pytest.raises(SourceError) as caught:
        here().bind({"no_such_name": 1})
    assert "`no_such_name` is no variable of " in str(caught.value)


def test_class_bodies_and_their_globals() -> None:
    around = 5

    class Thing:
        global made_in_a_class
        x = here().values(["around", "module_name_", "x", "Thing"])
        here().bind({"y": 2, "made_in_a_class": 3})
        if y == 3:  # noqa: F821
            made_in_a_class = around

        class Inner:
            z = here().values(["around"])
            w = around

    assert Thing.x == {"around": 5, "module_name_": "a global"}
    assert (Thing.y, Thing.Inner.z) == (2, {"around": 5})  # type: ignore[attr-defined]
    assert globals().pop("made_in_a_class") == 3


def test_class_body_with_a_namespace_of_its_own() -> None:
    class Colour(Enum):
        RED = 1
        here().bind({"BLUE": 2})

    assert [colour.name for colour in Colour] == ["RED", "BLUE"]


def test_names() -> None:
    assert here().module_name == __name__
    if sys.version_info >= (3, 11):
        assert here().qualname == "test_names"


def test_containers() -> None:
    scope = here()
    originals = {"rows": [1], "n": 1}
    copies = scope.copied(originals)
    copies["rows"].append(2)
    assert originals == {"rows": [1], "n": 1}
    assert changed(originals, copies) == ["rows"]
