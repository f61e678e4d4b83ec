from __future__ import annotations

from typing import Any

import pytest
import torch

from insitu.run.misfit import misfit

PLACE = torch.zeros(9, 4)
IN_PLACE = "; one value for all rows is written in place, with `[:] = value`"


@pytest.mark.parametrize(
    ("new", "got"),
    [
        (0, "int 0" + IN_PLACE),
        (torch.zeros(4), "shape (4,) torch.float32" + IN_PLACE),
        (torch.zeros(1, 4), "shape (1, 4) torch.float32" + IN_PLACE),
        (torch.zeros(8, 4), "shape (8, 4) torch.float32"),
        (torch.zeros(9, 9, 4), "shape (9, 9, 4) torch.float32"),
        (torch.zeros(9, 4, dtype=torch.int64), "shape (9, 4) torch.int64"),
        ((PLACE,), "tuple of 1 (shape (9, 4) torch.float32)"),
        (None, "NoneType None"),
    ],
)
def test_what_can_be_written_in_place_is_told_how(new: Any, got: str) -> None:
    assert str(misfit("mlp_out[3]", PLACE, new)) == f"mlp_out[3] takes shape (9, 4) torch.float32; got {got}"


def test_a_value_of_parts_is_taken_in_parts() -> None:
    text = "layer.output takes tuple of 2 (shape (9, 4) torch.float32, shape (9, 4) torch.float32); got int 0"
    assert str(misfit("layer.output", (PLACE, PLACE), 0)) == text
