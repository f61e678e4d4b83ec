"""Tables in the graphs: what a tap adds to a request's row, and by what it multiplies it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON, triton

from insitu.engine.taps.kernel import edit_and_copy
from insitu.run.affine import Affine

PARTS, SLOTS, FACTORS = 2, 3, 4
_TRIED = 4


class Entry(NamedTuple):
    """Rows, whether the sum of the place's tensors is edited or else the number of the one that is, and how."""

    rows: slice | tuple[int, ...]
    summed: bool
    part: int
    edits: Affine


class Vectors:
    """The vectors of tables' edits, shared by all places of one width. Each tensor is copied in once."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.memory: torch.Tensor = torch.zeros(count, width, device=device, dtype=torch.float32)
        self._slots: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._free = list(range(count))

    def fit(self, vectors: Iterable[torch.Tensor]) -> bool:
        """Whether all of these can be held at once."""
        return len({id(vector) for vector in vectors}) <= self.memory.shape[0]

    def hold(self, vectors: Sequence[torch.Tensor]) -> list[int]:
        """The slots of these vectors, which take those of others if there is no room."""
        keys = [(id(vector), vector._version) for vector in vectors]
        missing = {key: vector for key, vector in zip(keys, vectors, strict=True) if key not in self._slots}
        if missing:
            self._make_room(len(missing), set(keys))
            for key, vector in missing.items():
                self._slots[key] = (self._free.pop(), vector)  # held, so that its id stays its own
            slots = _sent(torch.tensor([self._slots[key][0] for key in missing]), self.memory.device)
            self.memory[slots] = torch.stack([each.reshape(-1).to(self.memory) for each in missing.values()])
        return [self._slots[key][0] for key in keys]

    def _make_room(self, count: int, kept: set[tuple[int, int]]) -> None:
        for key in [key for key in self._slots if key not in kept]:
            if len(self._free) >= count:
                return
            self._free.append(self._slots.pop(key)[0])


def _sample(like: torch.Tensor, number: int, generator: torch.Generator) -> Affine:
    """Edits of one row: all that there are, those that leave its direction, or one direction taken out."""
    edits, width = Affine(), like.shape[-1]
    vector, along, onto = torch.randn(3, width, generator=generator).to(like.device).unbind()
    if number != 2:
        edits.scale, edits.vector, edits.weight, edits.bias = 0.5, vector, 2.0, 1.0
    if number != 1:
        edits.along, edits.onto, edits.turn = along, along if number == 2 else onto, -1 / width
    return edits


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on ``device``, for which nobody waits."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Table:
    """One place's: for each row and tensor three slots (-1 for none), of what is added, of what the row is multiplied
    with and of what that stretches; their factors; and for each row whether the sum of its tensors is meant."""

    def __init__(self, rows: int, vectors: Vectors) -> None:
        device = vectors.memory.device
        self.vectors = vectors
        nothing = np.array(Affine().factors, np.float32)
        self._empty = np.full((rows, PARTS * SLOTS + 1), -1, np.int32), np.tile(nothing, (rows, PARTS))
        self.slots: torch.Tensor
        self.factors: torch.Tensor
        self.slots, self.factors = (torch.from_numpy(each.copy()).to(device) for each in self._empty)
        self._now: list[tuple[Any, ...]] = []

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.factors.nbytes

    def set(self, entries: Sequence[Entry]) -> None:
        if not entries and not self._now:
            return
        held = iter(self.vectors.hold([vector for entry in entries for vector in entry.edits.vectors]))
        now = [
            (rows, summed, part, [list(islice(held, len(group))) for group in edits.groups], edits.factors)
            for rows, summed, part, edits in entries
        ]
        if now == self._now:
            return
        self._now = now
        where, factors = (each.copy() for each in self._empty)
        for rows, summed, part, slots, own in now:
            chosen = rows if isinstance(rows, slice) else list(rows)
            where[chosen, -1] = int(summed)
            for number, group in enumerate(slots, SLOTS * part):
                where[chosen, number] = group or -1
            factors[chosen, FACTORS * part : FACTORS * (part + 1)] = own
        self.slots.copy_(_sent(torch.from_numpy(where), self.slots.device))
        self.factors.copy_(_sent(torch.from_numpy(factors), self.factors.device))

    def edit_and_copy(self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        """Edits the rows of the live tensors in place and copies what comes of it."""
        if tensors[0].is_cuda and HAS_TRITON:
            self._by_kernel(tensors, copies)
        else:
            self._by_torch(tensors, copies)

    def fault(self, like: Sequence[torch.Tensor]) -> float:
        """How far, relative to their norm, rows of tensors like these are off after all that it can do to a row."""
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(_TRIED, each.shape[-1], generator=generator).to(each)[: len(self.slots)] for each in like]
        pair = len(given) > 1
        with torch.inference_mode(False):  # a vector is known by its version
            samples = [_sample(given[0], row, generator) for row in range(min(_TRIED - 1, len(given[0])))]
        entries = [
            Entry(slice(row, row + 1), pair and row == 0, int(pair and row == 2), each)
            for row, each in enumerate(samples)
        ]
        self.set(entries)
        edited, copies = [each.clone() for each in given], [torch.zeros_like(each) for each in given]
        self.edit_and_copy(edited, copies)
        self.set([])
        for rows, summed, part, edits in entries:
            parts = [each[rows].float() for each in given]
            value = sum(parts[1:], parts[0]) if summed else parts[part]
            edits.apply(value)
            for number, each in enumerate(given):
                each[rows] = value if number == part else each[rows] * (not summed)
        pairs = zip((*edited, *copies), given * 2, strict=True)
        return max(((one.float() - two.float()).norm() / two.float().norm()).item() for one, two in pairs)

    def _by_torch(self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        rows = tensors[0].shape[0]
        slots, factors = self.slots[:rows], self.factors[:rows]
        summed = (slots[:, -1] == 1)[:, None]
        values = [tensor.float() for tensor in tensors]
        values[0] = torch.where(summed, sum(values[1:], values[0]), values[0])
        for part, (tensor, copy) in enumerate(zip(tensors, copies, strict=True)):
            scale, weight, bias, turn = factors[:, FACTORS * part : FACTORS * (part + 1), None].unbind(1)
            added, along, onto = (self._vectors_in(slots[:, SLOTS * part + i, None]) for i in range(SLOTS))
            value = torch.where(scale == 0, 0.0, values[part] * scale) + weight * added + bias
            turned = torch.where(slots[:, SLOTS * part + 1, None] >= 0, values[part], 0.0) * along
            value += turn * turned.sum(-1, keepdim=True) * onto
            tensor.copy_(torch.where(summed, 0.0, value) if part else value)
            copy[:rows].copy_(tensor)

    def _vectors_in(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.where(slots >= 0, self.vectors.memory[slots[:, 0].clamp(min=0)], 0.0)

    def _by_kernel(self, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        first, second = tensors[0], tensors[-1]
        rows, width = first.shape
        block = min(1024, triton.next_power_of_2(width))
        kernel: Any = edit_and_copy
        kernel[rows, triton.cdiv(width, block)](
            first, second, copies[0], copies[-1], self.slots, self.factors, self.vectors.memory,
            width, first.stride(0), second.stride(0), pair=len(tensors) > 1, block=block,
        )  # fmt: skip
