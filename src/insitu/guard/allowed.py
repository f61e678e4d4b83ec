"""What a restricted block holds in place of modules and functions: the same things, by list."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from insitu.block import save
from insitu.guard import names
from insitu.guard.errors import NotAllowedError
from insitu.net.refs import Device, Dtype, Member, ModuleRef

__all__ = ["Allowed", "Kind", "Namespace", "member", "namespace", "resolved"]

_INT_BITS = 8192


class Allowed:
    """A function that a block may call. ``watched``: it is torch's, and its keywords are looked at."""

    __slots__ = ("function", "name", "watched")

    def __init__(self, function: Callable[..., Any], name: str, watched: bool = False) -> None:
        self.function: Callable[..., Any] = function
        self.name: str = name
        self.watched: bool = watched

    def __repr__(self) -> str:
        return f"<function {self.name}>"

    def __reduce__(self) -> Any:
        module, _, name = self.name.rpartition(".")
        return member, (module, name)


class Kind(Allowed):
    """One that makes values of a class, and stands for it in ``isinstance``."""

    __slots__ = ("kind",)

    def __init__(self, function: Callable[..., Any], name: str, kind: Any) -> None:
        super().__init__(function, name)
        self.kind: Any = kind


class Namespace:
    """A module as far as it is in the list. Pickles by its name."""

    __slots__ = ("members", "name")

    def __init__(self, name: str, members: Mapping[str, Any]) -> None:
        self.name: str = name
        self.members: Mapping[str, Any] = members

    def get(self, name: str) -> Any:
        if name not in self.members:
            raise NotAllowedError(f"`{self.name}.{name}` is not in the list of what a restricted block may use")
        return self.members[name]

    def __repr__(self) -> str:
        return f"<module {self.name}>"

    def __reduce__(self) -> Any:
        return namespace, (self.name,)


@functools.lru_cache(maxsize=16)
def namespace(name: str) -> Namespace:
    """The module of that name."""
    makers: Mapping[str, Callable[[], Mapping[str, Any]]] = {
        "torch": _torch,
        "torch.nn": lambda: {"functional": namespace("torch.nn.functional")},
        "torch.nn.functional": lambda: _functions("torch.nn.functional", names.NN),
        "torch.linalg": lambda: _functions("torch.linalg", names.LINALG),
        "torch.special": lambda: _functions("torch.special", names.SPECIAL),
        "torch.fft": lambda: _functions("torch.fft", names.FFT),
        "math": _math,
        "insitu": lambda: {"save": Allowed(save, "insitu.save")},
    }
    if name not in makers:
        raise NotAllowedError(f"the module `{name}` is not in the list of what a restricted block may use")
    return Namespace(name, makers[name]())


def member(module: str, name: str) -> Any:
    """Something of a module, as after ``from module import name``."""
    return namespace(module).get(name)


def resolved(ref: Any) -> Any:
    """What a module, a member of one, a dtype or a device is to a restricted block; None for other references."""
    if isinstance(ref, ModuleRef):
        return namespace(ref.name)
    if isinstance(ref, Member):
        return member(ref.module, ref.name)
    if isinstance(ref, Dtype):
        if ref.name not in names.DTYPES:
            raise NotAllowedError(f"the dtype {ref.name!r:.40} is not in the list of what a restricted block may use")
        return getattr(torch, ref.name)
    if isinstance(ref, Device):
        try:
            return torch.device(ref.name)
        except (RuntimeError, UnicodeError):
            raise NotAllowedError(f"{ref.name!r:.40} is no device") from None
    return None


def _functions(module: str, wanted: frozenset[str]) -> dict[str, Any]:
    found = vars(importlib.import_module(module))
    return {name: Allowed(found[name], f"{module}.{name}", True) for name in sorted(wanted) if name in found}


def _torch() -> dict[str, Any]:
    made = {name: getattr(torch, name) for name in names.DTYPES if hasattr(torch, name)}
    functions = names.TORCH - names.DTYPES
    for name in sorted(functions):
        value = getattr(torch, name, None)
        if isinstance(value, (int, float)):
            made[name] = value
        elif callable(value):
            made[name] = Allowed(value, f"torch.{name}", True)
    made["Tensor"] = Kind(_no_constructor, "torch.Tensor", torch.Tensor)
    made["device"] = Kind(torch.device, "torch.device", torch.device)
    made["Size"] = Kind(torch.Size, "torch.Size", torch.Size)
    made["nn"] = namespace("torch.nn")
    for name in ("linalg", "special", "fft"):
        made[name] = namespace(f"torch.{name}")
    return made


def _no_constructor(*_: Any, **__: Any) -> Any:
    raise NotAllowedError("`torch.Tensor(...)` may hold memory of others: use torch.tensor, torch.zeros or torch.full")


def _math() -> dict[str, Any]:
    found = {name: getattr(math, name) for name in names.MATH if hasattr(math, name)}
    found["lcm"] = _lcm
    return {name: Allowed(value, f"math.{name}") if callable(value) else value for name, value in found.items()}


def _lcm(*numbers: int) -> int:
    made = 1
    for number in numbers:
        made = math.lcm(made, number)
        if made.bit_length() > _INT_BITS:
            raise OverflowError(f"math.lcm: an int of more than {_INT_BITS} bits")
    return made
