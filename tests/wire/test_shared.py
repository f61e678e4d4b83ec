"""What a block changes of its caller's objects, done again to the originals."""

from __future__ import annotations

import array
import io
import random
import threading
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from insitu.wire import Shared, apply, changeable
from tests.wire.test_port import sent


class Experiment:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.best: Any = None


def elsewhere(value: Any, change: Callable[[Any], None]) -> None:
    """Lets ``change`` be done to a copy of ``value``, and to the original what it changed there."""
    nodes = changeable([value])
    copy, copies = sent((value, nodes))
    shared = Shared(copies)
    change(copy)
    assert apply(nodes, sent(shared.changes())) == []


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

    found = {id(each) for each in changeable([block])}
    assert {id(rows), id(COUNTS)} <= found
    assert changeable(["text", len, 5, torch.float32, None]) == []


class Slotted:
    __slots__ = ("rows", "total", "unset")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.total = 0


class SlottedAndOpen(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.more = 1


class Rows(list[int]):
    note = ""


def test_slots() -> None:
    for made in (Slotted(), SlottedAndOpen()):
        rows = made.rows

        def change(copy: Slotted) -> None:
            copy.rows.append(3)
            copy.total += 2
            copy.unset = 5

        elsewhere(made, change)
        assert made.rows is rows
        assert (rows, made.total, made.unset) == ([3], 2, 5)


def test_an_attribute_taken_away() -> None:
    made = SlottedAndOpen()

    def change(copy: SlottedAndOpen) -> None:
        del copy.total, copy.more

    elsewhere(made, change)
    assert not hasattr(made, "total")
    assert not hasattr(made, "more")


def appended(rows: Any) -> None:
    rows.append(4)


@pytest.mark.parametrize(
    ("made", "change", "expected"),
    [
        (deque([1, 2], maxlen=2), appended, deque([2, 4])),
        (Counter("ab"), lambda it: it.update("a"), Counter("aab")),
        (defaultdict(list, a=[1]), lambda it: it["b"].append(2), {"a": [1], "b": [2]}),
        (OrderedDict(a=1, b=2), lambda it: it.move_to_end("a"), OrderedDict(b=2, a=1)),
        (UserDict(a=1), lambda it: it.update(b=2), {"a": 1, "b": 2}),
        (Rows([1]), appended, [1, 4]),
        (bytearray(b"ab"), lambda it: it.extend(b"c"), bytearray(b"abc")),
        (array.array("i", [1]), appended, array.array("i", [1, 4])),
        (types.SimpleNamespace(a=1), lambda it: setattr(it, "a", 2), types.SimpleNamespace(a=2)),
        ({1: (5, [])}, lambda it: it[1][1].append(2), {1: (5, [2])}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_of_other_kinds(made: Any, change: Callable[[Any], None], expected: Any) -> None:
    elsewhere(made, change)
    assert made == expected


def test_attributes_of_a_container() -> None:
    rows = Rows([1])
    elsewhere(rows, lambda copy: setattr(copy, "note", "seen"))
    assert (rows.note, list(rows)) == ("seen", [1])


@pytest.mark.parametrize("size", [3, 5000, 40_000])
def test_tensors_and_arrays_keep_their_memory(size: int) -> None:
    tensor, whole, values = torch.zeros(size), torch.zeros(2, size), np.zeros(size)
    row = whole[1]

    def change(copy: Any) -> None:
        copy[0].add_(1)
        copy[1][:2] = 7
        copy[2][0] = 5

    elsewhere([tensor, row, values], change)
    assert tensor.sum() == size
    assert whole[1, :3].tolist() == [7, 7, 0]
    assert whole[0].sum() == 0
    assert values[:2].tolist() == [5, 0]


def test_changes_in_inference_mode_are_seen() -> None:
    tensor = torch.zeros(40_000)

    def change(copy: torch.Tensor) -> None:
        with torch.inference_mode():
            copy += 1

    elsewhere(tensor, change)
    assert tensor[0] == 1


def test_a_module_trains_elsewhere() -> None:
    torch.manual_seed(0)
    linear, norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
    probe = torch.nn.Sequential(linear, norm)
    weight, before = linear.weight, linear.weight.detach().clone()
    optimizer = torch.optim.Adam(probe.parameters())

    def change(copy: Any) -> None:
        module, steps = copy
        module(torch.randn(4, 3)).square().sum().backward()
        steps.step()
        module.eval()

    elsewhere((probe, optimizer), change)
    assert linear.weight is weight
    assert weight.grad is not None
    assert not torch.equal(weight, before)
    assert norm.num_batches_tracked == 1
    assert not norm.training
    assert set(optimizer.state) == set(probe.parameters())


def test_generators_of_random_numbers_and_files() -> None:
    ours = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1), io.StringIO()]
    theirs = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1), io.StringIO()]

    def change(copy: list[Any]) -> None:
        copy[0].random()
        copy[1].random()
        torch.rand(1, generator=copy[2])
        copy[3].write("seen")

    elsewhere(ours, change)
    change(theirs)
    assert ours[0].random() == theirs[0].random()
    assert ours[1].random() == theirs[1].random()
    assert torch.equal(torch.rand(1, generator=ours[2]), torch.rand(1, generator=theirs[2]))
    assert ours[3].getvalue() == "seen"


def counter() -> tuple[Callable[[], None], Callable[[], int]]:
    count = 0

    def more() -> None:
        nonlocal count
        count += 1

    return more, lambda: count


def test_variables_that_functions_share() -> None:
    more, count = counter()
    seen = []

    def change(copy: Any) -> None:
        copy[0]()
        seen.append(copy[1]())

    elsewhere((more, count), change)
    more()
    assert seen == [1]
    assert count() == 2


def test_attributes_of_functions() -> None:
    def block() -> None:
        block.calls += 1  # type: ignore[attr-defined]

    block.calls = 0  # type: ignore[attr-defined]
    elsewhere(block, lambda copy: copy())
    assert block.calls == 1  # type: ignore[attr-defined]


CALLS = 0


def called() -> None:
    global CALLS
    CALLS += 1


def test_variables_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__import__(__name__, fromlist=["CALLS"]), "CALLS", 0)
    elsewhere(called, lambda copy: copy())
    assert CALLS == 1


class Guarded:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}


def test_what_a_class_does_not_let_travel_stays() -> None:
    made = Guarded()
    lock = made.lock
    elsewhere(made, lambda copy: setattr(copy, "count", 3))
    assert (made.count, made.lock) == (3, lock)


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (iter([1, 2]), next),
        ([1], lambda copy: copy.append(LOCK)),
    ],
    ids=["an iterator", "a lock put in"],
)
def test_what_can_t_be_brought_home_is_told(made: Any, change: Callable[[Any], Any]) -> None:
    nodes = changeable([made])
    copy, copies = sent((made, nodes))
    shared = Shared(copies)
    change(copy)
    changes = shared.changes(lambda value: not isinstance(value, dict) or made.__class__ is list or None)
    assert apply(nodes, sent(changes)) == [made]


LOCK = threading.Lock()
