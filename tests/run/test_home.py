"""Many small tensors come home in one copy, each as it was and with memory of its own."""

from __future__ import annotations

from typing import Any

import torch

from insitu.run.home import brought_together


def test_each_comes_home_as_itself() -> None:
    base = torch.arange(60.0).reshape(12, 5)
    rows = list(base.split(1)) + [base[i] for i in range(4)] + [base.T, torch.ones(3), "no tensor"]
    rows.append(rows[0])
    found = list(brought_together(rows, is_far=lambda tensor: True))
    assert len(found) == 16  # those of a shape that few have are left, and one that stands twice comes once
    for old, new in found:
        assert torch.equal(old, new)
        assert new.untyped_storage().nbytes() == new.numel() * new.element_size()
        assert not new.is_inference()


def test_what_is_on_the_host_stays() -> None:
    values: list[Any] = [torch.ones(2) for _ in range(9)]
    assert not list(brought_together(values))
