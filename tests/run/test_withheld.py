"""What does not go by tokens may hold what is other requests': a restricted block sees no more than its shape."""

from __future__ import annotations

import pytest
import torch

from insitu import WriteError
from insitu.run.served import Rows, Served, Withheld


def served() -> Served:
    hidden, shared = torch.arange(10.0).reshape(5, 2), torch.ones(3, 7)
    return Served((hidden, {"cache": shared}), Rows(1, 3, 5), "model.layer.output", withhold=True)


def test_rows_are_served_and_the_rest_is_withheld() -> None:
    hidden, rest = served().value
    assert hidden.tolist() == [[2, 3], [4, 5]]
    assert isinstance(rest["cache"], Withheld)
    assert repr(rest["cache"]) == "<a tensor (3, 7) that does not go by tokens, withheld>"


def test_a_value_with_something_withheld_in_it_can_be_replaced_around_it() -> None:
    one = served()
    hidden, rest = one.value
    one.replace((hidden + 1, rest))
    assert one.value[0].tolist() == [[3, 4], [5, 6]]
    assert one.value[1] == rest
    live = one.write_back({}, 100)
    assert live[0].tolist() == [[0, 1], [3, 4], [5, 6], [6, 7], [8, 9]]
    assert torch.equal(live[1]["cache"], torch.ones(3, 7))


def test_what_is_withheld_is_not_replaced() -> None:
    one = served()
    with pytest.raises(WriteError, match=r"\['cache'\] can't be replaced: it does not go by tokens"):
        one.replace((one.value[0], {"cache": torch.zeros(3, 7)}))
