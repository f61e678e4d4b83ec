"""Lists, dicts and sets of the caller: copied, and compared afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.block.containers import changed, copied

LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(object))
CONTAINERS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


def mutable_parts(value: Any) -> list[Any]:
    found = [value] if isinstance(value, (list, dict, set)) else []
    if isinstance(value, (list, tuple)):
        return found + [part for item in value for part in mutable_parts(item)]
    if isinstance(value, dict):
        return found + [part for item in value.values() for part in mutable_parts(item)]
    return found


@given(CONTAINERS)
def test_copies_are_equal_and_share_no_container(value: Any) -> None:
    copy = copied({"x": value})["x"]
    assert copy == value
    assert not {id(part) for part in mutable_parts(value)} & {id(part) for part in mutable_parts(copy)}
    assert changed({"x": value}, {"x": copy}) == []
    if not mutable_parts(value):
        assert copy is value


@given(CONTAINERS, st.data())
def test_any_change_is_seen(value: Any, data: st.DataObject) -> None:
    copy = copied({"x": value})["x"]
    parts = mutable_parts(copy)
    if not parts:
        return
    part = data.draw(st.sampled_from(parts))
    if isinstance(part, list):
        part.append(object())
    elif isinstance(part, dict):
        part[object()] = 1
    else:
        part.add(object())
    assert changed({"x": value}, {"x": copy}) == ["x"]


def test_sharing_and_cycles() -> None:
    shared: list[Any] = [1]
    loop: list[Any] = [shared]
    loop.append(loop)
    copies = copied({"a": shared, "b": [shared, shared], "loop": loop})
    assert copies["b"][0] is copies["b"][1] is copies["a"]
    assert copies["loop"][1] is copies["loop"]
    assert copies["loop"][0] is copies["a"]
    assert changed({"loop": loop}, {"loop": copies["loop"]}) == []
    copies["a"].append(2)
    assert changed({"loop": loop, "b": [shared, shared]}, copies) == ["loop", "b"]


def test_cycle_through_a_tuple() -> None:
    inner: list[Any] = []
    pair = (inner, 1)
    inner.append(pair)
    copy = copied({"x": pair})["x"]
    assert copy is not pair
    assert copy[0] is not inner
    assert copy[0][0][0] is copy[0]


OF_THE_MODULE: list[Any] = []


def by_global(value: Any) -> None:
    OF_THE_MODULE.append(value)


def by_another_function(value: Any) -> None:
    by_global(value)


class Recorder:
    def record(self, value: Any) -> None:
        OF_THE_MODULE.append(value)


@pytest.mark.parametrize("function", [by_global, by_another_function, Recorder().record, lambda: OF_THE_MODULE])
def test_what_a_function_uses_is_not_copied(function: Any) -> None:
    rest = [1]
    copies = copied({"rows": OF_THE_MODULE, "record": function, "rest": rest, "both": (OF_THE_MODULE, rest)})
    assert copies["rows"] is copies["both"][0] is OF_THE_MODULE
    assert copies["rest"] is copies["both"][1] is not rest


def test_what_a_closure_holds_is_not_copied_nor_what_is_in_it() -> None:
    rows: list[Any] = []
    tables: dict[str, Any] = {"rows": (rows,)}
    late: list[Any]

    def record(value: Any) -> None:
        tables["rows"][0].append((value, late))

    copies = copied({"rows": rows, "tables": tables, "record": record})
    assert copies["rows"] is rows
    assert copies["tables"] is tables
    late = []
    assert copied({"late": late, "record": record})["late"] is late


@pytest.mark.parametrize("kind", [list, dict, set])
def test_subclasses_and_other_objects_are_the_same_objects(kind: type) -> None:
    value = type("Sub", (kind,), {})()
    assert copied({"x": value})["x"] is value
    assert copied({"x": [value]})["x"][0] is value


def test_leaves_are_compared_by_identity() -> None:
    class Never:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = object.__hash__

    leaf = Never()
    values = {"x": [leaf, (leaf,)], "y": {leaf}, "z": {leaf: leaf}}
    copies = copied(values)
    assert changed(values, copies) == []
    copies["x"][0] = Never()
    assert changed(values, copies) == ["x"]


def test_order_of_a_dict_counts_and_rebinding_does_not() -> None:
    values = {"d": {"a": 1, "b": 2}, "l": [1]}
    copies = copied(values)
    copies["d"]["a"] = copies["d"].pop("a")
    copies["new"] = [1]
    assert changed(values, copies) == ["d"]
