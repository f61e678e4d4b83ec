"""What a value may stand for, rather than be."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["MODULES", "Device", "Dtype", "FunctionRef", "Member", "ModuleRef", "Named", "Record", "Ref"]

MODULES = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "math", "insitu")
"""The modules that a name of a block may mean on the other side."""


class ModuleRef(NamedTuple):
    """One of ``MODULES``."""

    name: str


class Member(NamedTuple):
    """Something of one of ``MODULES``, as after ``from torch import softmax``."""

    module: str
    name: str


class Dtype(NamedTuple):
    """A dtype of torch's, ``"float32"``."""

    name: str


class Device(NamedTuple):
    """A device of torch's, ``"cpu"``."""

    name: str


class FunctionRef(NamedTuple):
    """A function of the caller's: its number among those of the message."""

    number: int


class Named(NamedTuple):
    """What means the same on both sides: ``("model", "")``, ``("tracer", "")``, ``("node", "model.layers.3")``."""

    kind: str
    path: str = ""


Ref = ModuleRef | Member | Dtype | Device | FunctionRef | Named


class Record(tuple[Any, ...]):
    """A named tuple of another side's class: a tuple whose items are attributes as well."""

    _fields: tuple[str, ...]
    _name: str

    def __new__(cls, name: str, fields: tuple[str, ...], values: list[Any]) -> Record:
        made = super().__new__(cls, values)
        made._name, made._fields = name, fields
        return made

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", ())
        if name in fields:
            return self[fields.index(name)]
        raise AttributeError(f"`{self.__dict__.get('_name', 'Record')}` has no field `{name}`")

    def __repr__(self) -> str:
        pairs = zip(self._fields, self, strict=True)
        return f"{self._name}({', '.join(f'{name}={value!r}' for name, value in pairs)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self._name, self._fields, list(self))
