"""A restricted block as it is written down for many requests: under the guard, with names in place of values.

All that it does goes through the guard as when it runs, so that it may do there what it may do anywhere. What would
tell a name from a value, or could go another way with the one than with the other, has no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from insitu.block import Saves
from insitu.guard import names
from insitu.guard.allowed import Allowed
from insitu.guard.kinds import is_of
from insitu.guard.limits import GuardLimits
from insitu.guard.operators import Operators, walked
from insitu.guard.runtime import Runtime
from insitu.run.held import Held, NotStraightError, Shown
from insitu.run.straight import Recording
from insitu.run.sym import Sym, Torch
from insitu.tree import LayerStream

__all__ = ["Written", "sees"]

_PART = 16
"""Of what one block may use, the part that writing it down may take."""
_OPERATIONS = 32
"""Of torch's, that a step is when it is done alone: more than any is."""
_STANDS_IN = (Sym, Held, Shown)
_TRACERS = ("insitu.engine.worker.writing.StepsAlone",)
_BUILTINS = ("range", "len", "enumerate", "zip", "list", "tuple", "dict", "reversed", "int", "min", "max", "sum")
_TAKE_ALL = (*_BUILTINS, "Tensor", "Tracer")
"""Functions, or the classes of methods, that names may be given to."""
_COMPARE = ("index", "count", "remove")
_TEXTS = (str, int, float, bool, type(None))


class Written(Runtime):
    """One time that a block is written down. ``show``: what it sees of a value of its caller's."""

    writable = (torch.Tensor, LayerStream, Sym)

    def __init__(
        self, limits: GuardLimits, saves: Saves | None, show: Callable[[Any], Any], recording: Recording
    ) -> None:
        operations, seconds = max(limits.operations // _PART, 1), limits.seconds / _PART
        super().__init__(replace(limits, operations=operations, seconds=seconds), saves)
        self.operators: Operators = _Operators(self.meter, self.iterable)
        self._show = show
        self._most = limits.operations
        self._table = {name: self._table[name] for name in _BUILTINS}
        self._recording = recording
        recording.builtins = self._table

    def require_savable(self, values: Iterable[Any]) -> None:
        """It has ended. Raises ``NotStraightError`` if a run alone might do more than it may."""
        super().require_savable(values)
        if self.meter.operations + _OPERATIONS * len(self._recording.program.steps) > self._most:
            raise NotStraightError

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, (Sym, Held)):
            self.meter.tick()
            if name not in names.TENSOR and name not in names.TENSOR_ATTRIBUTES:
                raise NotStraightError
            found = getattr(value, name)
            return Allowed(found, f"Tensor.{name}") if callable(found) else found
        if is_of(value, _TRACERS):
            self.meter.tick()
            found = getattr(value, name)
            return Allowed(found, f"Tracer.{name}") if callable(found) else found
        return super().attribute(value, name)

    def item(self, value: Any, index: Any) -> Any:
        if isinstance(value, _STANDS_IN):
            self.meter.tick()
            return value[index]
        return super().item(value, index)

    def _items(self, value: Any) -> Iterable[Any]:
        return iter(value) if isinstance(value, _STANDS_IN) else super()._items(value)

    def call(self, function: Any, /, *args: Any, **named: Any) -> Any:
        if isinstance(function, Allowed):
            of, _, name = function.name.rpartition(".")
            if function.watched:
                self.meter.tick()
                if of != "torch":
                    raise NotStraightError
                return getattr(Torch(), name)(*args, **named)
            takes_all = (of or name) in _TAKE_ALL and name not in _COMPARE
            if of == "insitu" or (not takes_all and sees((args, named))):
                raise NotStraightError
        elif is_of(function, ("insitu.guard.code.GuardedFunction",)):
            raise NotStraightError
        return super().call(function, *args, **named)

    def shown(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: self._show(value) for name, value in values.items()}

    def formatted(self, value: Any, conversion: int, spec: str) -> str:
        if type(value) not in _TEXTS:
            raise NotStraightError
        return super().formatted(value, conversion, spec)


class _Operators(Operators):
    def compare(self, symbol: str, a: Any, b: Any) -> Any:
        if sees((a, b)):
            raise NotStraightError
        return super().compare(symbol, a, b)

    def hashable(self, key: Any) -> Any:
        if sees(key):
            raise NotStraightError
        return super().hashable(key)

    def _require_operand(self, value: Any) -> None:
        if not isinstance(value, (Sym, Held)):
            super()._require_operand(value)


def sees(value: Any) -> bool:
    """Whether something in it stands for a value."""
    return any(isinstance(part, _STANDS_IN) for part in walked(value))
