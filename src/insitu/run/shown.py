"""What a block that is written down sees of its caller's values, and of Python."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch

from insitu.run.held import Held, NotStraightError, Shown, global_names, require_known
from insitu.run.kinds import is_plain
from insitu.run.sym import Torch

BUILTINS: dict[str, Callable[..., Any]] = {
    "range": range, "len": len, "enumerate": enumerate, "zip": zip, "list": list, "tuple": tuple, "dict": dict,
    "reversed": reversed, "int": int, "min": min, "max": max,
}  # fmt: skip


def shown(value: Any, known: Callable[[Any], bool]) -> Any:
    """What a block that is written down sees of one of its caller's values; ``known`` says which objects answer for
    themselves there."""
    if is_plain(value) or known(value):
        return value
    if value is torch:
        return Torch()
    if type(value) in (list, tuple) and all(is_plain(part) or known(part) for part in value):
        return Shown(value) if type(value) is list else value
    if type(value) is torch.Tensor and not value.requires_grad and value.layout is torch.strided and not value.is_meta:
        return Held(value)
    raise NotStraightError


def with_values(function: FunctionType, show: Callable[[Any], Any]) -> FunctionType:
    """The function, with what it closes over and the globals that it names as ``show`` shows them."""
    code = function.__code__
    require_known(code, code.co_freevars)
    cells = [CellType(show(cell.cell_contents)) for cell in function.__closure__ or ()]
    names = {name for name in global_names(code) if name in function.__globals__}
    namespace = {"__builtins__": BUILTINS, **{name: show(function.__globals__[name]) for name in names}}
    if function.__kwdefaults__ or function.__defaults__:
        raise NotStraightError
    return FunctionType(code, namespace, function.__name__, None, tuple(cells))


class Outside:
    """Tells which objects the names mean that a function has from outside."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = function.__closure__ or ()
        self._globals = function.__globals__
        self._names = {name for name in global_names(function.__code__) if name in self._globals}

    def __call__(self) -> list[int]:
        return [id(cell.cell_contents) for cell in self._cells] + [id(self._globals.get(name)) for name in self._names]
