"""Rows of many requests, wherever they lie in a step."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from insitu.run.followed import FollowedRows
from insitu.run.served import Rows
from insitu.run.spread import Brought, rows_of_all

CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """How many rows each request has, and whose they are: the number of a run for many, or less than 0: its own."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    return counts, draw(st.lists(st.integers(-2, 2), min_size=len(counts), max_size=len(counts)))


@given(step=steps())
def test_what_is_brought_together_goes_back_where_it_was(step: tuple[list[int], list[int]]) -> None:
    counts, owners = step
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    spans = list(pairwise(starts))
    total = starts[-1]
    live = torch.arange(total * 3.0).reshape(total, 3)
    rows: dict[str, Rows] = {}
    for owner in {*owners}:
        mine = [(span, number) for number, (span, each) in enumerate(zip(spans, owners, strict=True)) if each == owner]
        if owner >= 0:
            rows[f"together/{owner}"] = rows_of_all(mine[::-1], total, CPU)
        elif owner == -1:  # another one is beside each
            rows.update((f"{number}", Rows(*span, total)) for span, number in mine)
            rows.update((f"{number}/1", Rows(*span, total)) for span, number in mine)
    if not rows:
        return
    brought = Brought(rows)
    sent = brought.of(live).clone()
    wanted = live.clone()
    for name, each in rows.items():
        there = brought.rows[name]
        assert there.total == len(sent)
        assert there.scattered is None
        assert torch.equal(sent[there.start : there.stop], live[rows[name].of(live)])
        assert (there.members, list(there.counts)) == (each.members, list(each.counts))
        wanted[rows[name].of(live)] = live[rows[name].of(live)] + 1000.0
    brought.put(live, sent + 1000.0)
    assert torch.equal(live, wanted)


def test_a_later_stage_says_in_which_order_its_rows_are() -> None:
    company = FollowedRows(str, CPU)
    company.tell({"together/0": {"a": 0, "b": 4, "c": 2}, "together/1": {"d": 0}})
    rows: dict[str, Rows] = {}
    settled = company.settle(rows, {"c": (0, 2), "a": (2, 3), "x": (3, 4), "b": (4, 7)}, 7)
    assert list(rows) == ["together/0"]  # one request of the other is not in the step
    found = rows["together/0"]
    assert (found.members, found.counts, list(found.numbers)) == ((2, 0, 4), [2, 1, 3], [0, 1, 2, 4, 5, 6])
    assert company.is_as(settled)
    company.tell({"together/0": {"b": 4, "c": 2}})
    assert not company.is_as(settled)
    assert "a" not in company
