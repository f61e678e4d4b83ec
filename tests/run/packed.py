"""A packed batch through a plain torch module: what vLLM does, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from insitu.run import BlockRun, Interleaver, Rows
from insitu.tree import Node

WIDTH, VOCAB = 4, 11


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Layer(torch.nn.Module):
    """Returns a pair whose sum is the stream, and adds in place, as vLLM's fused norms do."""

    def __init__(self, factor: float, act: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = Scale(factor)
        self.act = act

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        return self.act(self.mlp(residual)), residual


class Model(torch.nn.Module):
    """Two layers that share one activation; ``never`` is not called."""

    def __init__(self) -> None:
        super().__init__()
        act = torch.nn.Identity()
        self.layers = torch.nn.ModuleList([Layer(2.0, act), Layer(3.0, act)])
        self.never = torch.nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


def rows(count: int, start: float = 1.0) -> torch.Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).reshape(count, WIDTH) + start


class Packed:
    """One engine step at a time: requests' rows laid end to end, logits by request."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = Model() if model is None else model
        self.head = torch.randn(WIDTH, VOCAB)
        self.interleaver = Interleaver(self.model, lambda hidden: hidden @ self.head)
        outline = self.interleaver.modules.outline()
        self.nodes = Node("", lambda: outline)

    def run(self, block: Callable[[], Any]) -> BlockRun:
        return BlockRun(block, self.interleaver)

    @torch.inference_mode()
    def step(self, requests: Sequence[tuple[torch.Tensor, BlockRun | None]]) -> torch.Tensor:
        """The ids drawn, ``[requests, 1]``. ``requests``: rows, and the run beside them if traced."""
        inter = self.interleaver
        hidden = torch.cat([rows for rows, _ in requests])
        token_rows: dict[BlockRun, Rows] = {}
        request_rows: dict[BlockRun, Rows] = {}
        ends: list[int] = []
        for i, (rows, run) in enumerate(requests):
            start = ends[-1] if ends else 0
            ends.append(start + len(rows))
            if run is not None:
                token_rows[run] = Rows(start, ends[-1], len(hidden))
                request_rows[run] = Rows(i, i + 1, len(requests))
        if inter.begin(token_rows):
            inter.open(token_rows)
        try:
            out = self.model(hidden)
            inter.rows = request_rows
            logits = inter.logits(out[[end - 1 for end in ends]] @ self.head)
        finally:
            inter.close()
        return inter.samples(logits.argmax(-1, keepdim=True))

    def alone(self, rows: torch.Tensor, block: Callable[[], Any]) -> Any:
        """What ``block`` returns beside ``rows``, with no company; its error is raised."""
        run = self.run(block)
        self.step([(rows, run)])
        self.interleaver.finish(run, "done")
        if run.error is not None:
            raise run.error
        return run.returned
