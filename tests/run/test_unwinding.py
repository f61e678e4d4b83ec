"""torch's errors inside blocks, whose stack is not the forward's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from insitu.run.unwinding import STACKS_ARE_LEFT_OUT
from tests.run import forwards
from tests.run.packed import WIDTH, Packed, rows
from tests.run.test_source import packed_with


def raised_by_torch() -> str:
    # Where no function has the pair, an error is raised and dropped inside this comparison.
    assert range(3) != torch.zeros(3, WIDTH)
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) + torch.zeros(3)
    return str(caught.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="done where torch is built with libstdc++")
def test_stacks_are_left_out() -> None:
    assert STACKS_ARE_LEFT_OUT


@pytest.mark.parametrize("name", ["scaled_0", "range_0", "total_chunk_0"])
def test_torch_may_raise_wherever_a_block_has_waited(name: str) -> None:
    packed: Packed = packed_with(forwards.Mixed())
    said: list[str] = []

    def block() -> None:
        said.append(raised_by_torch())
        _ = getattr(packed.nodes.layers[0].mlp.source, name).output
        said.append(raised_by_torch())
        _ = packed.nodes.layers[1].output
        said.append(raised_by_torch())

    packed.alone(rows(2), block)
    assert said == ["The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 0"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "kept"), [("0", False), ("1", True)])
def test_stacks_are_there_for_who_asks_torch_for_them(asked: str, kept: bool) -> None:
    program = "import torch, insitu.run\ntorch.zeros(2) + torch.zeros(3)"
    environment = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": asked}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "must match the size of tensor b (3)" in done.stderr
    assert ("C++ CapturedTraceback" in done.stderr or "frame #" in done.stderr) is kept
