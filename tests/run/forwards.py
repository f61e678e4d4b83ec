"""Modules whose forwards hold operations of every kind. The lines count: tests name some of them."""

from __future__ import annotations

import functools

import torch


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    larger = torch.mul(x, factor)
    return shifted(larger)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5


class Mixed(torch.nn.Module):
    """Calls of functions, methods and modules, operators, a loop, a branch, keyword defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.nn.Identity()
        self.negative = False

    def forward(self, x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        """(x * factor + 0.5 + x, three times plus one) * 2"""
        large = scaled(x, factor)
        total = large + x
        for _ in range(3):
            total = torch.add(total, 1.0)
        total *= 2.0
        if self.negative:
            total = total.neg()
        halves = total.chunk(2, dim=-1)
        total = torch.cat([half.clone() for half in halves], -1)
        return self.act(total)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """What ``Mixed`` computes."""
    return (x * 2 + 0.5 + x + 3) * 2


class Derived(Mixed):
    """``super()``, and names that are private to the class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, factor=2.0) + self.__own(x)

    def __own(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def closing(offset: float) -> torch.nn.Module:
    class Closing(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return torch.add(x, offset) * times

    return Closing()


def noted(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        notes.append(function.__name__)
        return function(*args, **kwargs)

    return around


notes: list[str] = []


class Decorated(torch.nn.Module):
    @noted
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + 1.0


@noted
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


class Spread(torch.nn.Module):
    """Its first operation's rows share memory, and its second changes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x[:, :1].expand(x.shape)
        x.add_(1.0)
        return wide + x


class Lazy(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        yield x


class Foreign(torch.nn.Module):
    """Its forward is not written in Python."""

    forward = torch._C._nn.gelu


class Outer(torch.nn.Module):
    """Runs one module and hands on what it returns."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y.clone()


def reading(model):
    """A helper of a block, in another module than the block."""
    return model.layer.source
