"""Objects whose content is one value: tensors, arrays, buffers, generators of random numbers, iterators.

For each kind: a mark that differs once the content has been changed, the content, and how another's content
is put into it. Of an iterator no more is known than that it moved on.
"""

from __future__ import annotations

import array
import hashlib
import io
import operator
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_COMPARED = 4096
"""Bytes of a tensor up to which its values are compared too, since `.data` and numpy write past its version."""


@dataclass(frozen=True)
class Leaf:
    """``put`` is None for what can't be brought to where another of its kind is."""

    mark: Callable[[Any], Any]
    content: Callable[[Any], Any]
    put: Callable[[Any, Any], None] | None


def leaf_of(value: Any) -> Leaf | None:
    """None for all that has parts or can't be changed."""
    for kinds, leaf in _plain():
        if isinstance(value, kinds):
            return leaf
    if type(value).__module__ in ("builtins", "itertools"):
        return _ITERATOR if hasattr(value, "__next__") else None
    return None


def _plain() -> Iterator[tuple[Any, Leaf]]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        yield torch.Tensor, _TENSOR
        yield torch.Generator, _TORCH_GENERATOR
    if numpy is not None:
        yield numpy.ndarray, _ARRAY
        yield numpy.random.Generator, _NUMPY_GENERATOR
    yield from _OF_PYTHON


def _tensor_mark(tensor: Any) -> Any:
    return _values_mark(tensor), tensor.requires_grad, _values_mark(tensor.grad) if tensor.is_leaf else None


def _values_mark(tensor: Any) -> Any:
    if tensor is None:
        return None
    torch = sys.modules["torch"]
    mark = (None if tensor.is_inference() else tensor._version, tuple(tensor.shape))
    if tensor.layout != torch.strided or tensor.is_meta or tensor.device.type != "cpu" or tensor.is_quantized:
        return mark
    if not 0 < tensor.nbytes <= _COMPARED:
        return mark
    return *mark, tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor_content(tensor: Any) -> Any:
    return tensor.detach(), tensor.requires_grad, tensor.grad if tensor.is_leaf else None


def _put_tensor(tensor: Any, content: Any) -> None:
    torch = sys.modules["torch"]
    values, requires_grad, gradient = content
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape == values.shape:
            tensor.copy_(values)
        else:
            tensor.data = values.to(tensor.device)
    if tensor.is_leaf and not tensor.is_inference():
        tensor.requires_grad_(requires_grad)
        tensor.grad = gradient


def _array_mark(value: Any) -> Any:
    numpy = sys.modules["numpy"]
    plain = (
        value.tolist() if value.dtype.hasobject else hashlib.sha1(numpy.ascontiguousarray(value).view("u1")).digest()
    )
    return value.shape, plain


def _put_array(value: Any, content: Any) -> None:
    if value.shape != content.shape:
        value.resize(content.shape, refcheck=False)
    value[...] = content


def _put_bit_generator(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _put_whole(value: Any, content: Any) -> None:
    value[:] = content


def _file_content(file: Any) -> Any:
    return None if file.closed else (file.getvalue(), file.tell())


def _put_file(file: Any, content: Any) -> None:
    if content is None:
        file.close()
        return
    text, place = content
    file.seek(0)
    file.truncate()
    file.write(text)
    file.seek(place)


def _attributes_mark(thing: Any) -> Any:
    return {name: value if isinstance(value, (str, int, float)) else id(value) for name, value in vars(thing).items()}


def _where(iterator: Any) -> Any:
    return operator.length_hint(iterator, -1), repr(iterator) if type(iterator).__module__ == "itertools" else None


_TENSOR = Leaf(_tensor_mark, _tensor_content, _put_tensor)
_TORCH_GENERATOR = Leaf(
    lambda it: it.get_state().numpy().tobytes(), lambda it: it.get_state(), lambda it, state: it.set_state(state)
)
_ARRAY = Leaf(_array_mark, lambda it: it, _put_array)
_NUMPY_GENERATOR = Leaf(lambda it: repr(it.bit_generator.state), lambda it: it.bit_generator.state, _put_bit_generator)
_ITERATOR = Leaf(_where, lambda it: None, None)
OTHER = Leaf(_attributes_mark, lambda it: None, None)
"""For objects of installed packages, which have their own mind about what their attributes mean."""
_OF_PYTHON: list[tuple[Any, Leaf]] = [
    ((bytearray, array.array), Leaf(bytes, lambda it: it[:], _put_whole)),
    (random.Random, Leaf(lambda it: it.getstate(), lambda it: it.getstate(), lambda it, state: it.setstate(state))),
    ((io.StringIO, io.BytesIO), Leaf(_file_content, _file_content, _put_file)),
]
