"""Values as a pickle with its large parts beside it."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _class_setstate as _set_class
from cloudpickle.cloudpickle import _code_reduce as _reduced_code
from cloudpickle.cloudpickle import _make_function as _function_from

from .errors import reduced_error
from .modules import by_value

PersistentId = Callable[[Any], Any]
PersistentLoad = Callable[[Any], Any]


def dumps(value: Any, persistent_id: PersistentId) -> tuple[bytes, list[memoryview]]:
    """``value`` as bytes, and the buffers of its tensors and arrays."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    with by_value():
        _Pickler(file, persistent_id, buffers.append).dump(value)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def loads(data: bytes, buffers: Sequence[memoryview], persistent_load: PersistentLoad) -> Any:
    unpickler = _Unpickler(io.BytesIO(data), buffers=buffers)
    unpickler.load_persistent = persistent_load
    return unpickler.load()


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self, file: Any, persistent_id: PersistentId, keep: Callable[[pickle.PickleBuffer], Any] | None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)
        self._identify = persistent_id

    def persistent_id(self, obj: Any) -> Any:
        return self._identify(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return reduced_error(obj, _in_band)
        if isinstance(obj, types.CodeType):
            make, args, *_ = _reduced_code(obj)
            return _code_from, (make, args, obj.co_filename)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj, torch):
            return _reduced_tensor(obj, torch)
        if isinstance(obj, types.CellType):
            return types.CellType, (), _contents(obj), None, None, _fill_cell
        return _own_reduced(super().reducer_override(obj), obj)


def _in_band(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, lambda obj: None, None).dump(value)
    return file.getvalue()


def _own_reduced(reduced: Any, obj: Any) -> Any:
    """What cloudpickle makes of functions and classes, but functions that share a variable go on sharing it, and
    a class that comes back to where it was defined is left as it is there."""
    if not isinstance(reduced, tuple):
        return reduced
    if reduced[0] is _function_from:
        make, args, (attributes, rest), *others = reduced
        return make, (*args[:4], obj.__closure__), (attributes, {**rest, "__closure__": None}), *others
    if reduced[-1] is _set_class:
        if obj not in _ARRIVED:
            _DEFINED[obj] = os.getpid()
        return *reduced[:-1], _update_class
    return reduced


_ARRIVED: weakref.WeakSet[type] = weakref.WeakSet()
_DEFINED: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
"""Classes that were sent, with the process that did it: a forked worker inherits them."""


def _update_class(kind: type, state: Any) -> None:
    if _DEFINED.get(kind) != os.getpid():
        _ARRIVED.add(kind)
        _set_class(kind, state)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not bound yet
        return ()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _code_from(make: Any, args: tuple[Any, ...], filename: str) -> types.CodeType:
    # cloudpickle leaves the file's name out; tracebacks need it.
    return make(*args).replace(co_filename=filename)


class _Unpickler(pickle.Unpickler):
    load_persistent: PersistentLoad

    def persistent_load(self, pid: Any) -> Any:
        return self.load_persistent(pid)


def _is_plain(tensor: Any, torch: Any) -> bool:
    # Those that hang on a graph, and those of other layouts, torch itself knows how to carry, or refuses.
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and tensor.grad_fn is None
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _reduced_tensor(tensor: Any, torch: Any) -> tuple[Any, ...]:
    device = tensor.device.type
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    kind = type(tensor).__name__
    described = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), device, kind, tensor.requires_grad)
    return _tensor_from, (pickle.PickleBuffer(raw.numpy()), *described)


def _tensor_from(raw: Any, dtype: str, shape: tuple[int, ...], device: str, kind: str, requires_grad: bool) -> Any:
    import torch

    with torch.inference_mode(False):
        kept = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8)
        tensor = kept.view(getattr(torch, dtype)).reshape(shape)
        if device != "cpu":
            tensor = tensor.to(device)
        if kind == "Parameter":
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor
