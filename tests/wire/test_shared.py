"""What a block changes of its caller's objects, done again to the originals."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from insitu.wire import Shared, apply, changeable


class Experiment:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.best: Any = None


def elsewhere(value: Any, change: Callable[[Any], None]) -> None:
    """Lets ``change`` be done to a copy of ``value``, and to the original what it changed there."""
    nodes = changeable([value])
    copy, copies = pickle.loads(pickle.dumps((value, nodes)))
    shared = Shared(copies)
    change(copy)
    apply(nodes, pickle.loads(pickle.dumps(shared.changes())))


def test_a_list_grows_and_keeps_what_it_had() -> None:
    first = torch.ones(2)
    rows = [first]
    elsewhere(rows, lambda copy: copy.append(5))
    assert rows[0] is first
    assert rows[1] == 5


def test_what_was_moved_is_the_same_object() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    rows = {"a": a, "b": b}
    elsewhere(rows, lambda copy: copy.update(a=copy["b"], b=copy["a"]))
    assert rows["a"] is b
    assert rows["b"] is a


def test_containers_in_containers_stay_themselves() -> None:
    inner: list[int] = []
    rows = {"inner": inner, "again": inner}
    elsewhere(rows, lambda copy: copy["again"].append(copy))
    assert rows["inner"] is inner
    assert inner[0] is rows


def test_attributes_of_the_users_own_objects() -> None:
    experiment = Experiment()
    seen = experiment.seen

    def change(copy: Experiment) -> None:
        copy.seen.append(7)
        copy.best = copy.seen

    elsewhere(experiment, change)
    assert seen == [7]
    assert experiment.best is seen


def test_a_set() -> None:
    rows = {1}
    elsewhere(rows, lambda copy: copy.add(2))
    assert rows == {1, 2}


@pytest.mark.parametrize("rows", [[1, 2], {"a": [1]}, {3}, Experiment()])
def test_nothing_comes_home_of_what_did_not_change(rows: Any) -> None:
    assert Shared(changeable([rows])).changes() == {}


COUNTS: dict[str, int] = {}


def test_what_functions_close_over_and_use_of_their_module() -> None:
    rows: list[int] = []

    def block() -> None:
        rows.append(COUNTS["calls"])

    assert [id(each) for each in changeable([block])] == [id(rows), id(COUNTS)]
    assert [id(each) for each in changeable([Experiment().seen, torch.ones(1), "text", len])][1:] == []
