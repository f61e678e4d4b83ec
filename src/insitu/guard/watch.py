"""Watches every operation of torch that a restricted block makes, whichever way it comes to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from insitu.guard.errors import NotAllowedError
from insitu.guard.meter import Meter

__all__ = ["Watch", "require_indices"]

_QUICK = 1 << 18
_LARGEST = 1 << 31
# Their results are no larger than these many elements for each of their input.
_BY_VALUE = {"nonzero": 8, "masked_select": 1, "index": 1, "unique_dim": 2, "_unique2": 3, "unique_consecutive": 3}
_SQUARED = ("diag_embed", "diag", "block_diag")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv", "addmv", "convolution", "_cdist_forward")
_SOLVERS = ("svd", "qr", "eigh", "eig", "inv_ex", "solve_ex", "lu_factor_ex", "det", "pinv", "cholesky_ex", "lstsq")
_CUBED = 1 << 33
_PIECES = ("unbind", "split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk")


class Watch(TorchDispatchMode):
    """On for as long as the block itself runs. Refuses what would take too much memory before it is taken."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap what watches, at each operation; a restricted block is compiled by nobody."""
        return False

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        self._meter.tick()
        given = [*_tensors(args), *_tensors(kwargs)]
        self._check(func, name, args, kwargs, given)
        made = func(*args, **kwargs)
        for tensor in _tensors(made):
            if tensor.numel() > _LARGEST:
                self._meter.stop(f"`{name}` makes a view of {tensor.numel()} elements, more than {_LARGEST}")
            self._meter.hold(tensor)
        return made

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        if torch.Tag.pointwise not in func.tags and not _is_view(func):
            for tensor in given:
                self._require_memory_for(tensor, name)
        if name in ("bincount", "repeat_interleave"):
            self._meter.allocate(8 * _size_by_value(args, kwargs), name)
            return
        bound = _bound(func, args, kwargs, given)
        if any(tensor.is_cuda for tensor in given):
            require_indices(name, args)
        _require_division(name, kwargs, given)
        if name in _SQUARED:
            bound = _QUICK + 1
        if name in _PIECES:
            self._meter.tensors(_pieces(name, *args[:3]))
        if bound <= _QUICK or _is_view(func):
            return
        self._meter.clock()
        if name in _BY_VALUE:
            self._meter.allocate(8 * _BY_VALUE[name] * max(tensor.numel() for tensor in given), name)
            return
        results = self._results(func, name, args, kwargs)
        for size in results:
            self._meter.allocate(size, name)
        self._require_work(name, given, sum(results))

    def _require_memory_for(self, tensor: torch.Tensor, name: str) -> None:
        """An expanded tensor takes no memory until an operation makes a copy of it for itself, which nobody sees."""
        size = tensor.numel() * tensor.element_size()
        if size > _QUICK and tensor.layout == torch.strided and size > tensor.untyped_storage().nbytes():
            self._meter.allocate(size, name)

    def _results(self, func: Any, name: str, args: Any, kwargs: Any) -> list[int]:
        """Sizes of what an operation is going to make, told by running it without memory."""
        if any(each.alias_info is not None for each in func._schema.returns):
            return []  # it writes into what is there
        try:
            with torch._C._DisableTorchDispatch():
                made = func(
                    *_on_meta(args), **_on_meta({**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
                )
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                raise NotAllowedError(f"`{name}` of values this large: it can't be told how much it makes") from None
            raise
        return [tensor.numel() * tensor.element_size() for tensor in _tensors(made)]

    def _require_work(self, name: str, given: list[torch.Tensor], result: int) -> None:
        if name in _PRODUCTS and len(given) > 1:
            first, second, *_ = sorted((tensor.numel() for tensor in given), reverse=True)
            if math.isqrt(first * second * max(result // 4, 1)) > self._meter.limits.work:
                self._meter.stop(
                    f"`{name}` of tensors this large is more than {self._meter.limits.work} multiplications"
                )
        if "attention" in name and len(given) > 1 and given[0].numel() * given[1].shape[-2] > self._meter.limits.work:
            self._meter.stop(f"`{name}` of tensors this large is more than {self._meter.limits.work} multiplications")
        is_solver = any(part in name for part in _SOLVERS) and given and given[0].dim() >= 2
        if is_solver and given[0].numel() * min(given[0].shape[-2:]) > _CUBED:
            self._meter.stop(f"`{name}` of a matrix this large takes too long")


def _bound(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> int:
    """How many elements an operation's result has at most, as far as shapes and numbers tell."""
    if torch.Tag.pointwise in func.tags:
        return math.prod(map(max, zip_longest(*(reversed(tensor.shape) for tensor in given), fillvalue=1)))
    bound = math.prod(max(tensor.numel(), 1) for tensor in given)
    return bound * math.prod(abs(int(number)) + 1 for number in _numbers((args, tuple(kwargs.values()))))


def _require_division(name: str, kwargs: Any, given: list[torch.Tensor]) -> None:
    """Refuses a division of ints by which a CPU ends the process: the smallest by -1 has no result."""
    truncates = name in ("div", "div_") and kwargs.get("rounding_mode") == "trunc"
    if truncates and not any(tensor.is_floating_point() for tensor in given):
        raise NotAllowedError("`rounding_mode='trunc'` of ints is not in the list: use `//`, or floats")


def _pieces(name: str, tensor: torch.Tensor, given: Any = 0, axis: int = 0) -> int:
    """How many views an operation makes."""
    if isinstance(given, (list, tuple)):
        return len(given)
    if name == "unbind":
        return tensor.shape[given] if tensor.dim() else 1
    size = tensor.shape[axis] if tensor.dim() else 1
    return min(size, int(given)) if "chunk" in name else -(-size // max(int(given), 1))


def _size_by_value(args: Any, kwargs: Any) -> int:
    """Elements that ``bincount`` or ``repeat_interleave`` make, which the values of their first tensor say."""
    counts = next(_tensors(args), None)
    asked = [int(number) for number in _numbers((args[1:], tuple(kwargs.values())))]
    if counts is None or not counts.numel():
        return max(asked, default=0)
    with torch._C._DisableTorchDispatch():
        if int(counts.min()) < 0:
            raise ValueError("counts and repeats are not negative")
        return max(int(counts.max()) + 1, int(counts.sum()), *asked, 0)


def require_indices(name: str, args: Any) -> None:
    """Raises ``IndexError`` for indices out of range, by which a GPU would fail for all who use it."""
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        for axis, index in _by_axis(args[0], args[1]):
            _require_within(index, args[0].shape[axis], name)
    elif name in ("embedding",):
        _require_within(args[1], args[0].shape[0], name, negative=False)
    elif name in ("take", "put_", "put"):
        _require_within(args[1], args[0].numel(), name)
    elif name in _ALONG and len(args) > 2 and isinstance(args[2], torch.Tensor) and args[0].dim():
        _require_within(args[2], args[0].shape[args[1]], name, negative=False)
    elif name.startswith("nll_loss"):
        classes = args[0].shape[1 if args[0].dim() > 1 else 0]
        _require_within(args[1][args[1] != args[4]], classes, name, negative=False)
    elif name.startswith(("multinomial", "bernoulli")):
        chances = args[0]
        high = 1.0 if name.startswith("bernoulli") else float("inf")
        if not bool(((chances >= 0) & (chances <= high) & chances.isfinite()).all()):
            raise ValueError(f"`{name}` of values that are no probabilities")
        if name == "multinomial" and not bool((chances.sum(-1) > 0).all()):
            raise ValueError(f"`{name}` of values that are all 0")
    elif name == "binary_cross_entropy" and not bool(((args[0] >= 0) & (args[0] <= 1)).all()):
        raise ValueError(f"`{name}` of values that are no probabilities")
    elif name.startswith("masked_scatter") and int(args[1].expand_as(args[0]).sum()) > args[2].numel():
        raise IndexError(f"`{name}`: fewer values than places")


_ALONG = ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
_ALONG += ("index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_")
_ALONG += ("index_reduce", "index_reduce_")


def _by_axis(tensor: torch.Tensor, indices: Any) -> Iterator[tuple[int, torch.Tensor]]:
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
        elif index.dtype in (torch.bool, torch.uint8):
            axis += index.dim()
        else:
            yield axis, index
            axis += 1


def _require_within(index: torch.Tensor, size: int, name: str, negative: bool = True) -> None:
    if not index.numel():
        return
    low, high = int(index.min()), int(index.max())
    if high >= size or low < (-size if negative else 0):
        raise IndexError(f"`{name}`: index {high if high >= size else low} is out of range for a size of {size}")


def _is_view(func: Any) -> bool:
    return bool(func.is_view) if hasattr(func, "is_view") else False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value if math.isfinite(value) else 0
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _numbers(part)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(map(_on_meta, value)) if not hasattr(value, "_fields") else value
    if isinstance(value, dict):
        return {key: _on_meta(part) for key, part in value.items()}
    return value
