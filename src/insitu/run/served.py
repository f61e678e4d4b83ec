"""What one request sees of a live value, and how its edits get back.

A block gets private memory, not the live buffer: one copy of the request's rows, made when the
value is served. The engine may then reuse its buffer without the block ever noticing, and the
block may keep, slice or change what it holds at any time. When the block moves on, a tensor that
was changed in place (its version counter says so) is copied back into the live rows. Measured on
the CPU build this costs 2 us a tensor; watching every operation with a function mode, the other
way to keep held values safe, costs 9 us an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from insitu.block import LocationError, WriteError
from insitu.run.memory import require_memory
from insitu.run.misfit import misfit

Index = slice | torch.Tensor | tuple[int | slice, ...]


class Rows(NamedTuple):
    """The rows ``start:stop`` of one request in a batch of ``total`` rows.

    ``members`` and ``counts``: of several requests, who they are by number, in order, and how many rows each has;
    ``scattered``, and on the host ``numbers``, are their rows where others lie between them. ``batched``: a tensor
    may have a batch axis of one before its rows, and heads between the two. A block sees it without the batch axis.
    """

    start: int
    stop: int
    total: int
    batched: bool = False
    scattered: torch.Tensor | None = None
    numbers: Sequence[int] = ()
    members: tuple[int, ...] = ()
    counts: Sequence[int] = ()

    def of(self, tensor: torch.Tensor) -> Index | None:
        """The index of the request's rows in a tensor; None if it does not go by rows.

        Raises ``LocationError`` if a batched one may go by rows on either of two axes, and it matters which.
        """
        mine = slice(self.start, self.stop)
        if self.scattered is not None:
            return self.scattered if tensor.dim() > 0 and tensor.shape[0] == self.total else None
        if self.batched and tensor.dim() > 1 and tensor.shape[0] == 1:
            by_heads = tensor.dim() == 4 and tensor.shape[2] == self.total
            if tensor.shape[1] == self.total:
                if by_heads and self.stop - self.start < self.total:
                    raise LocationError(
                        f"a tensor {tuple(tensor.shape)} among {self.total} tokens of several requests: it can't be "
                        f"told whether its tokens are on axis 1 or 2. Trace this prompt alone"
                    )
                return (0, mine)
            if by_heads:
                return (0, slice(None), mine)
        return mine if tensor.dim() > 0 and tensor.shape[0] == self.total else None


def map_tensors(value: Any, convert: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor in its tuples, lists and dicts replaced by ``convert(tensor)``."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, (tuple, list)):
        return rebuilt(value, [map_tensors(part, convert) for part in value])
    if isinstance(value, dict):
        return {key: map_tensors(part, convert) for key, part in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in order."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def numbers_of(tensors: Iterable[torch.Tensor], value: Any) -> set[int]:
    """Which of the tensors in ``value``, each counted once, these are."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, tensors_of(value))))}
    return {numbers[id(each)] for each in tensors}


def rebuilt(value: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """A tuple, named tuple or list like ``value``, of other parts."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


class Withheld:
    """Stands in what a block is served for a tensor that is not its request's alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(tensor.shape)

    def __repr__(self) -> str:
        return f"<a tensor {self.shape} that does not go by tokens, withheld>"


class Leaf:
    """One private tensor and the live tensor that it was copied from."""

    __slots__ = ("compare", "edited", "live", "number", "private", "replaced", "rows", "version")

    def __init__(
        self, live: torch.Tensor, rows: Index | None, compare: bool, private: torch.Tensor | None = None
    ) -> None:
        self.compare: bool = compare
        self.live: torch.Tensor = live
        self.rows: Index | None = rows
        self.private: torch.Tensor = _copied(live, rows) if private is None else private
        self.version: int = self.private._version
        self.replaced: bool = False
        self.number: int = 0
        self.edited: torch.Tensor | None = None

    @property
    def changed(self) -> bool:
        if self.replaced or self.private._version != self.version:
            return True
        return self.compare and not torch.equal(self.private, self.live if self.rows is None else self.live[self.rows])

    def adopt(self, new: torch.Tensor) -> None:
        """Makes a private copy of ``new`` the value, to be written back."""
        old = self.private
        if self.changed and not self.replaced:
            self.edited = old
        self.private = new.detach().to(device=old.device, dtype=old.dtype, copy=True)
        self.replaced = True


class Served:
    """One visit of a place as one request sees it.

    ``fixed``: memory that does not go by tokens whatever its shape, such as parameters and buffers.
    ``compare``: the block may change values behind torch's back (``.data``, ``.numpy()``), so that
    only a comparison shows it. ``withhold``: of tensors that do not go by tokens, which may hold what is other
    requests', the block sees no more than the shape. ``what``: the place, as errors name it.
    """

    __slots__ = ("_leaves", "_withheld", "edited", "live", "touched", "value", "what")

    def __init__(
        self,
        live: Any,
        rows: Rows,
        what: object,
        fixed: frozenset[int] = frozenset(),
        compare: bool = False,
        withhold: bool = False,
    ) -> None:
        leaves: dict[int, Leaf] = {}
        withheld: dict[int, Withheld] = {}

        def private(tensor: torch.Tensor) -> Any:
            leaf = leaves.get(id(tensor))
            if leaf is None:
                mine = None if storage_of(tensor) in fixed else rows.of(tensor)
                if mine is None and withhold:
                    return withheld.setdefault(id(tensor), Withheld(tensor))
                leaf = leaves[id(tensor)] = Leaf(tensor, mine, compare)
                leaf.number = len(leaves) + len(withheld) - 1
            return leaf.private

        self._withheld = withheld

        self.live: Any = live
        self._leaves = leaves
        self.edited: bool = False
        self.touched: set[int] = set()
        self.what: Any = what
        self.value: Any = map_tensors(live, private)

    def _shown(self, tensor: torch.Tensor) -> Any:
        leaf = self._leaves.get(id(tensor))
        return self._withheld[id(tensor)] if leaf is None else leaf.private

    def take(self, live: torch.Tensor, private: torch.Tensor) -> None:
        """Makes ``private``, which has the value already, what the block holds of ``live``."""
        leaf = self._leaves[id(live)]
        leaf.private, leaf.version = private, private._version
        self.value = map_tensors(self.live, self._shown)

    @property
    def is_made(self) -> bool:
        """Whether the block holds any tensor of it."""
        return True

    def shared_stream(self, stream: Any) -> torch.Tensor | None:
        """The rows of a stream of the standard names, where they were computed for all requests at once."""
        return None

    def replace(self, value: Any) -> None:
        """Takes ``value`` as what the model goes on with.

        Raises ``WriteError`` if its structure, or the shape or kind of a tensor in it, is another.
        """
        pairs: list[tuple[Leaf, torch.Tensor]] = []
        self._pair(self.live, value, "", pairs)
        # One tensor may stand at two places in the structure; the one that was assigned counts.
        for leaf, new in [pair for pair in pairs if pair[1] is not pair[0].private]:
            self._is_changed(leaf)
            leaf.adopt(new)
        self.value = map_tensors(self.live, self._shown)

    def move_to(self, live: Any) -> None:
        """From here on it is ``live``, which looks the same, that writes go back to."""
        tensors: list[torch.Tensor] = []
        map_tensors(live, tensors.append)
        moved: dict[int, Leaf] = {}

        def move(old: torch.Tensor) -> None:
            leaf, new = self._leaves.get(id(old)), tensors[len(order)]
            order.append(new)
            if leaf is None:
                self._withheld[id(new)] = self._withheld[id(old)]
            else:
                moved.setdefault(id(new), leaf).live = new

        order: list[torch.Tensor] = []
        map_tensors(self.live, move)
        self._leaves, self.live = moved, live

    def write_back(self, copies: dict[int, torch.Tensor], ids_below: int) -> Any:
        """Copies what was changed into the live rows; returns what the model goes on with.

        An in-place edit is made in the live tensor, seen by all who hold it. A replacement is the
        value of this place only: whoever else holds the tensor (it may be the residual stream itself)
        is not to see it, so it goes to a copy. ``copies`` are those made at this visit so far, for
        other requests, by their id, each with its original. Token ids and positions must be below
        ``ids_below``. ``touched`` then says which tensors, counted in the order of the structure, were edited
        in place.
        """
        replaced: dict[int, torch.Tensor] = {}
        for key, leaf in self._leaves.items():
            if not self._is_changed(leaf):
                continue
            self.edited = True
            rows, live = self._writable(leaf, ids_below)
            original = copies.get(key, live)
            apart = shares_elements(original)
            if not apart and (leaf.edited is not None or not leaf.replaced):
                self.touched.add(leaf.number)
            if leaf.edited is not None and not apart:
                _put(original, rows, leaf.edited)
            if (leaf.replaced or apart) and key not in copies:
                replaced[key] = live.clone()
                copies[id(replaced[key])] = live
                live = replaced[key]
            elif key in copies and not leaf.replaced and not apart:
                _put(original, rows, leaf.private)
            _put(live, rows, leaf.private)
        if not replaced:
            return self.live
        return map_tensors(self.live, lambda tensor: replaced.get(id(tensor), tensor))

    def write_back_in_place(self, ids_below: int) -> None:
        """As ``write_back``, where the caller goes on with the tensor that it has."""
        for leaf in self._leaves.values():
            if self._is_changed(leaf):
                rows, live = self._writable(leaf, ids_below)
                _put(live, rows, leaf.private)

    def _is_changed(self, leaf: Leaf) -> bool:
        if leaf.compare:
            require_memory(leaf.private, self.what)
        return leaf.changed

    def _writable(self, leaf: Leaf, ids_below: int) -> tuple[Index, torch.Tensor]:
        require_memory(leaf.private, self.what)
        if leaf.rows is None:
            raise WriteError(
                f"{self.what}: this tensor {tuple(leaf.live.shape)} does not go by tokens, so other requests use "
                f"it too; it can be read but not edited"
            )
        if not leaf.live.is_floating_point():
            # One out of range would take the whole engine down.
            wrong = [index for index in leaf.private.flatten().tolist() if not 0 <= index < ids_below]
            if wrong:
                kind = "token ids" if str(self.what) == "model.samples" else "ids or positions"
                raise WriteError(f"{self.what} takes {kind}, 0 to {ids_below - 1}; got {wrong[0]}")
        if leaf.private.shape != leaf.live[leaf.rows].shape:
            raise WriteError(f"{self.what}: the value was resized in place to {tuple(leaf.private.shape)}")
        return leaf.rows, leaf.live

    def _pair(self, live: Any, new: Any, where: str, pairs: list[tuple[Leaf, torch.Tensor]]) -> None:
        if isinstance(live, torch.Tensor):
            if id(live) in self._withheld:
                if new is not self._withheld[id(live)]:
                    raise WriteError(f"{self.what}{where} can't be replaced: it does not go by tokens")
                return
            leaf = self._leaves[id(live)]
            pairs.append((leaf, self._checked(leaf.private, new, where)))
        elif isinstance(live, (tuple, list)):
            if not isinstance(new, (tuple, list)) or len(new) != len(live):
                raise misfit(f"{self.what}{where}", live, new)
            for i, (a, b) in enumerate(zip(live, new, strict=True)):
                self._pair(a, b, f"{where}[{i}]", pairs)
        elif isinstance(live, dict):
            if not isinstance(new, dict) or new.keys() != live.keys():
                raise misfit(f"{self.what}{where}", live, new)
            for key, part in live.items():
                self._pair(part, new[key], f"{where}[{key!r}]", pairs)
        elif new is not live and (isinstance(new, torch.Tensor) or new != live):
            raise WriteError(f"{self.what}{where} is {live!r}, not a tensor: it can't be replaced")

    def _checked(self, old: torch.Tensor, new: Any, where: str) -> torch.Tensor:
        if not isinstance(new, torch.Tensor) or new.shape != old.shape:
            raise misfit(f"{self.what}{where}", old, new)
        if new.layout != torch.strided or new.is_meta:
            raise WriteError(f"{self.what}{where} takes a dense tensor with values; got {new.layout} on {new.device}")
        require_memory(new, f"what was written to {self.what}{where}")
        kind = "floating" if old.is_floating_point() else "integer"
        if new.is_floating_point() != old.is_floating_point() or new.is_complex() or new.dtype == torch.bool:
            raise WriteError(f"{self.what}{where} takes a {kind} tensor ({old.dtype}); got {new.dtype}")
        return new


def _copied(live: torch.Tensor, rows: Index | None) -> torch.Tensor:
    # Rows by number are a copy already.
    return live[rows] if isinstance(rows, torch.Tensor) else (live if rows is None else live[rows]).clone()


def _put(tensor: torch.Tensor, rows: Index, value: torch.Tensor) -> None:
    if isinstance(rows, torch.Tensor):
        tensor[rows] = value
    else:
        tensor[rows].copy_(value)


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether one element stands for several, as in an expanded tensor: it can't be edited where it is."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
