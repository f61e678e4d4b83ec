"""Values sent to the host ahead are those that were there, and only while they are as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from insitu.run.program import Home
from insitu.run.sending import Sender
from insitu.wire.pickles import dumps, loads


def travelled(value: Any) -> Any:
    body, buffers = dumps(value, lambda obj: None)
    return loads(body, [memoryview(bytearray(buffer)) for buffer in buffers], lambda name: None)


def sender() -> Sender:
    return Sender(is_far=lambda tensor: True)


@pytest.mark.parametrize("shape", [(1, 8), (300, 400)], ids=["many small ones", "large ones"])
def test_what_was_sent_is_found_with_memory_of_its_own(shape: tuple[int, int]) -> None:
    values = [torch.randn(shape) for _ in range(6)]
    one = sender()
    one.send({"rows": values, "again": values[0]})
    found = one.find(values)
    assert None not in found
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in [*found, *values]}) == 12
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in found)


def test_rows_of_a_tensor_are_sent_as_one() -> None:
    memory = torch.randn(5, 4)
    rows = memory.unsafe_split(1)
    one = sender()
    one.send_rows(memory, rows)
    found = one.find([rows[3], rows[0]])
    assert None not in found
    assert found[0].tolist() == memory[3:4].tolist()
    assert found[1].tolist() == memory[:1].tolist()


def test_what_was_changed_or_not_sent_is_not_found() -> None:
    values = [torch.randn(3) for _ in range(5)]
    one = sender()
    one.send(values)
    values[2] += 1
    assert [each is None for each in one.find(values)] == [False, False, True, False, False]
    assert one.find([torch.zeros(3), 3]) == [None, None]
    one.clear()
    assert one.find(values[:2]) == [None, None]


def test_values_come_home_from_where_they_were_sent() -> None:
    rows = list(torch.randn(6, 4).unsafe_split(1))
    one = sender()
    one.send(rows)
    changed = rows[5].clone()
    given: Any = {"rows": rows, "alone": rows[1], "pair": (rows[0], changed)}
    home = Home(one)
    brought = home._ordinary(given)
    assert brought["rows"][1] is brought["alone"]
    assert brought["pair"][0] is brought["rows"][0]
    assert [each.tolist() for each in brought["rows"]] == [each.tolist() for each in rows]


def test_what_nobody_holds_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    import insitu.run.sending as sending

    monkeypatch.setattr(sending, "_MOST_HELD", 10_000)
    one, kept = sender(), []
    for number in range(40):
        memory = torch.full((10, 16), float(number))
        rows = memory.unsafe_split(1)
        one.send_rows(memory, rows)
        if number % 10 == 0:
            kept.append(rows[3])
        del rows
    assert None not in one.find(kept)
    assert len(one._pages) < 30


@pytest.mark.parametrize("width", [4, 2**17], ids=["small rows", "large ones"])
@pytest.mark.parametrize("counts", [None, [2, 1, 3]], ids=["one each", "several each"])
def test_rows_of_many_are_taken_apart(width: int, counts: list[int] | None) -> None:
    packed = torch.randn(3 if counts is None else 6, width)
    one = sender()
    parcel = one.send_packed(packed, counts)
    assert parcel is not None
    wanted = [each.clone() for each in (packed.unbind() if counts is None else packed.split(counts))]
    packed.zero_()
    one.work(lambda: True)
    found = parcel.take_apart()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in found)
    assert found is parcel.take_apart()
    assert not one._parcels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.int64])
@pytest.mark.parametrize("counts", [None, [1] * 20, [7, 1, 10, 2], [20]])
def test_large_rows_share_pieces_and_nothing_else(dtype: torch.dtype, counts: list[int] | None) -> None:
    packed = (torch.arange(20 * 300_000).reshape(20, 300_000) % 251).to(dtype)
    one = sender()
    parcel = one.send_packed(packed, counts)
    assert parcel is not None
    found = parcel.take_apart()
    wanted = packed.unbind() if counts is None else packed.split(counts)
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(found, wanted, strict=True))
    assert all(each.untyped_storage().nbytes() == each.nbytes and not each.is_inference() for each in found)
    assert not any(each._is_view() for each in found)  # which can't be detached in place
    found[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True))
    rest = found[-1]
    del parcel
    assert one._pinned.used == packed.nbytes
    del found
    assert rest.nbytes <= one._pinned.used <= max(2**23, rest.nbytes)  # one piece is held by the last
    del rest
    assert one._pinned.used == 0


def test_what_is_on_the_host_is_not_sent() -> None:
    one = Sender(is_far=lambda tensor: False)
    assert one.send_packed(torch.zeros(3, 2), None) is None
    one = sender()
    parcel = one.send_packed(torch.zeros(3, 2), None)
    assert one._pinned.used == 24
    del parcel
    assert one._pinned.used == 0
    one.work(lambda: True)
    assert not one._parcels


@pytest.mark.parametrize("width", [4, 2**17], ids=["small rows", "large ones"])
@pytest.mark.parametrize("counts", [None, [2, 1, 3]], ids=["one each", "several each"])
@pytest.mark.parametrize("far", [True, False])
def test_rows_of_many_go_on_to_another_process(width: int, counts: list[int] | None, far: bool) -> None:
    packed = torch.randn(3 if counts is None else 6, width)
    wanted = packed.unbind() if counts is None else packed.split(counts)
    one = Sender(is_far=lambda tensor: far)
    one.keeps_whole = True
    parcel = one.send_packed(packed, counts) or one.brought(packed, counts)
    one.work(lambda: True)
    for chosen in ([0, 1, 2], [2, 0], [1]):
        found = travelled(parcel.of(chosen)).take_apart()
        assert [torch.equal(a, wanted[number]) for a, number in zip(found, chosen, strict=True)] == [True] * len(chosen)
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in found)
    found = travelled(parcel).take_apart()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
