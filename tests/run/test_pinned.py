"""How much memory may be page-locked."""

from __future__ import annotations

from insitu.run.pinned import Pinned

GIB = 2**30


def pinned(free: int, total: int = 16) -> Pinned:
    return Pinned(lambda: (free * GIB, total * GIB))


def test_four_gib_may_be_locked_whatever_is_free() -> None:
    one = pinned(free=0)
    assert one.has_room([GIB] * 4)
    assert not one.has_room([GIB] * 5)
    for _ in range(4):
        one.take(GIB)
    assert not one.has_room([1])


def test_more_is_locked_for_what_went_the_slower_way_before() -> None:
    one = pinned(free=16)
    for _ in range(4):
        one.take(GIB)
    assert [one.has_room([GIB]) for _ in range(3)] == [False, False, True]
    one.take(GIB)
    assert [one.has_room([GIB]) for _ in range(3)] == [False, False, True]


def test_a_fourth_of_the_memory_stays_free() -> None:
    one = pinned(free=10)
    one.take(4 * GIB)
    for _ in range(20):
        one.has_room([20 * GIB])
    assert one.has_room([GIB] * 6)
    assert not one.has_room([GIB] * 7)


def test_what_came_back_is_taken_again_for_its_size_alone() -> None:
    one = pinned(free=0)
    sizes = [GIB - 5] * 4
    for size in sizes:
        one.take(size)
    assert one.used == sum(sizes)
    assert not one.has_room([GIB])
    for size in sizes:
        one.give_back(size)
    assert one.used == 0
    assert one.has_room([GIB] * 4)  # as torch rounds them
    assert not one.has_room([GIB] * 5)
    assert not one.has_room([GIB // 2])
    one.take(GIB)
    assert not one.has_room([GIB] * 4)
