"""Tables in the graphs: what a tap adds to a request's row, and by what it multiplies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON, triton

from insitu.engine.taps.kernel import edit_and_copy
from insitu.run.affine import Affine

PARTS, SLOTS, FACTORS = 2, 3, 4
_TRIED = 4
_SAMPLED = ((0,), (1,), (2,)), ((0,), (), ()), ((), (1,), (1,))


class Entry(NamedTuple):
    """Rows, whether the sum of the place's tensors is edited or else the number of the one that is, and how: slots of
    what is added, of what the row is multiplied with and of what that stretches, each none, one or one for each row;
    and their factors."""

    rows: Sequence[int]
    summed: bool
    part: int
    slots: tuple[Sequence[int], ...]
    factors: tuple[float, ...]


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
        """Gives these vectors slots, and takes those of all others, which may be changed from now on in ways that no
        version tells of, as by NumPy. Returns the slots that were filled now."""
        keys = {(id(vector), vector._version): vector for vector in vectors}
        for key in self._slots.keys() - keys.keys():
            self._free.append(self._slots.pop(key)[0])
        missing = {key: vector for key, vector in keys.items() if key not in self._slots}
        if not missing:
            return []
        for key, vector in missing.items():
            self._slots[key] = (self._free.pop(), vector)  # held, so that its id stays its own
        filled = [self._slots[key][0] for key in missing]
        given = torch.stack([each.reshape(-1).to(self.memory) for each in missing.values()])
        self.memory[_sent(torch.tensor(filled), self.memory.device)] = given
        return filled

    def slots(self, edits: Affine) -> tuple[Sequence[int], ...]:
        """Those of its vectors, which are held."""
        return tuple([self._slots[id(each), each._version][0] for each in group] for group in edits.groups)

    def share(self, slots: Sequence[int], broadcast: Callable[[torch.Tensor], None]) -> None:
        """By all ranks: what is in these slots is what rank 0 has there."""
        index = _sent(torch.tensor(slots), self.memory.device)
        given = self.memory[index]
        broadcast(given)
        self.memory[index] = given


def _sample(number: int, vector: torch.Tensor, along: torch.Tensor, onto: torch.Tensor) -> Affine:
    """Edits of one row: all that there are, those that leave its direction, or one direction taken out."""
    edits = Affine()
    if number != 2:
        edits.scale, edits.vector, edits.weight, edits.bias = 0.5, vector, 2.0, 1.0
    if number != 1:
        edits.along, edits.onto, edits.turn = along, along if number == 2 else onto, -1 / len(along)
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
        self._now: list[Entry] = []

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.factors.nbytes

    def set(self, entries: Sequence[Entry]) -> None:
        """Does these edits, and no others. Of rows that no graph has nothing is noted."""
        if entries == self._now:
            return
        self._now = list(entries)
        where, factors = (each.copy() for each in self._empty)
        for rows, summed, part, slots, own in entries:
            chosen = np.array(rows, np.int64)
            inside = chosen < len(where)
            where[chosen[inside], -1] = int(summed)
            for number, group in enumerate(slots, SLOTS * part):
                given = np.array(group or [-1], np.int32)
                where[chosen[inside], number] = given[inside] if len(given) == len(chosen) else given
            factors[chosen[inside], FACTORS * part : FACTORS * (part + 1)] = own
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
        pair, memory = len(given) > 1, self.vectors.memory[:SLOTS]
        three = torch.randn(memory.shape, generator=generator).to(memory)
        samples = [_sample(row, *three.unbind()) for row in range(min(_TRIED - 1, len(given[0])))]
        entries = [
            Entry([row], pair and row == 0, int(pair and row == 2), _SAMPLED[row], each.factors)
            for row, each in enumerate(samples)
        ]
        before, held = self._now, memory.clone()
        memory.copy_(three)
        self.set(entries)
        edited, copies = [each.clone() for each in given], [torch.zeros_like(each) for each in given]
        self.edit_and_copy(edited, copies)
        self.set(before)
        memory.copy_(held)
        for (rows, summed, part, _, _), edits in zip(entries, samples, strict=True):
            parts = [each[rows].float() for each in given]
            value = sum(parts[1:], parts[0]) if summed else parts[part]
            edits.apply(value)
            for number, each in enumerate(given):
                each[rows] = value.to(each) if number == part else each[rows] * (not summed)
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
