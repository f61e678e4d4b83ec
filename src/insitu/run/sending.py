"""Sends values of a device to the host while the engine goes on, so that they are there when they are asked for."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from insitu.run.home import FEW, SMALL, tensors_within
from insitu.run.memory import require_memory
from insitu.run.parcels import Parcel, apart, carved, pieces_of
from insitu.run.pinned import Pinned, lock_by_threads

_MOST_HELD = 2**28
_of_lists: Any = torch  # of its functions for many tensors at once, pyright knows none
_WHAT = "a tensor to be brought home"


def _on_a_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


class Sent:
    """Tensors under way in one copy, and each as it was then."""

    __slots__ = ("_arrived", "_host", "_shape", "found", "nbytes", "tensors", "versions")

    def __init__(self, tensors: Sequence[torch.Tensor], host: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        """``arrived``: since when ``host`` has the copy; it has it already if that is None."""
        self.tensors: Sequence[torch.Tensor] = tensors
        self.versions: list[int] = [each._version for each in tensors]
        self.nbytes: int = sum(each.nbytes for each in tensors)
        self.found: list[torch.Tensor] | None = None
        """Their copies on the host, each with memory of its own; None until ``take_apart``."""
        self._shape = tensors[0].shape
        self._host: torch.Tensor | None = host
        self._arrived = arrived

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def take_apart(self) -> list[torch.Tensor]:
        """Waits until they are there."""
        host = self._host
        if self.found is None and host is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            with torch.inference_mode(False):
                copies: Any = [host]
                if self._shape != host.shape:
                    rows = len(self._shape) == host.dim() - 1
                    copies = torch.unbind_copy(host) if rows else torch.split_copy(host, 1)
                self.found, self._host = list(copies), None
        assert self.found is not None
        return self.found


class Sender:
    """Large tensors go into pinned memory of their own, which is handed over as it is; many small ones alike in one
    transfer, each of which is given memory of its own when there is time (``work``) or it is asked for."""

    def __init__(self, is_far: Callable[[torch.Tensor], bool] = _on_a_gpu) -> None:
        self._is_far = is_far
        self.keeps_whole = False
        """Whether rows of many are taken apart in another process."""
        self.in_use: bool = is_far is not _on_a_gpu or torch.cuda.is_available()
        self._known: dict[int, tuple[Sent, int]] = {}
        self._pages: list[Sent] = []
        self._together: deque[Sent] = deque()
        self._parcels: deque[weakref.ref[Parcel]] = deque()
        self._held = self._swept = 0
        self._pinned = Pinned()
        self._stream: torch.cuda.Stream | None = None

    def send(self, values: Any) -> None:
        """Sends what is in ``values``, which blocks are done with."""
        small: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
        large: dict[int, torch.Tensor] = {}
        known = self._known
        for tensor in tensors_within(values):
            if id(tensor) in known:
                continue
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
            if not plain or not self._is_far(tensor) or tensor.requires_grad or tensor.is_inference():
                continue
            require_memory(tensor, _WHAT)
            if tensor.nbytes > SMALL:
                large[id(tensor)] = tensor
            else:
                small.setdefault((tensor.shape, tensor.dtype, tensor.device), {})[id(tensor)] = tensor
        self._send_large(list(large.values()))
        for group in small.values():
            if len(group) >= FEW:
                tensors = list(group.values())
                self.send_rows(torch.stack(tensors), tensors)

    def send_rows(self, memory: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Sends ``memory``, along whose first axis ``rows`` lie, or lay."""
        if rows and self._is_far(memory):
            hosts, arrived = self._copied([memory])
            self._together.append(self._note(Sent(rows, hosts[0], arrived)))

    def send_packed(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> Parcel | None:
        """Sends rows of many requests, ``counts`` of each (None: one for each, without an axis for it). None for what
        is on the host, or has no room there in pinned memory."""
        if not self._is_far(tensor):
            return None
        is_apart = self._is_apart(tensor, counts)
        pieces = list(pieces_of(tensor, counts)) if is_apart else [(tensor, counts)]
        if not self._pinned.has_room([piece.nbytes for piece, _ in pieces]):
            return None
        hosts, arrived = self._copied([piece for piece, _ in pieces])
        if is_apart:
            hosts = [row for host, (_, own) in zip(hosts, pieces, strict=True) for row in carved(host, own)]
        parcel = Parcel(hosts, counts, is_apart, arrived)
        if not is_apart and not self.keeps_whole:
            self._parcels.append(weakref.ref(parcel))
        return parcel

    def brought(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> Parcel:
        """As ``send_packed``, of any tensor, which is nobody else's; waits for it."""
        if self._is_apart(tensor, counts) and (self.keeps_whole or tensor.device.type != "cpu"):
            rows = [row for piece, own in pieces_of(tensor, counts) for row in carved(piece.cpu().contiguous(), own)]
            return Parcel(rows, None, is_apart=True)
        host = tensor.cpu()
        return Parcel([host], counts, False) if self.keeps_whole else Parcel(apart(host, counts), None, is_apart=True)

    def _is_apart(self, tensor: torch.Tensor, counts: Sequence[int] | None) -> bool:
        """Whether each request's rows come home by themselves."""
        require_memory(tensor, _WHAT)
        return tensor.nbytes > SMALL * (tensor.shape[0] if counts is None else len(counts))

    def work(self, is_time: Callable[[], bool]) -> None:
        """While ``is_time``: gives memory of its own to what has arrived."""
        while self._together and self._together[0].has_arrived and is_time():
            self._together.popleft().take_apart()
        while self._parcels:
            parcel = self._parcels[0]()
            if parcel is not None and not (parcel.has_arrived and is_time()):
                return
            self._parcels.popleft()
            if parcel is not None:
                parcel.take_apart()

    def _send_large(self, tensors: list[torch.Tensor]) -> None:
        if not tensors or not self._pinned.has_room([each.nbytes for each in tensors]):
            return
        hosts, arrived = self._copied(tensors)
        for tensor, host in zip(tensors, hosts, strict=True):
            self._note(Sent([tensor], host, arrived))

    def _note(self, sent: Sent) -> Sent:
        self._known.update(zip(map(id, sent.tensors), zip(repeat(sent), range(len(sent.tensors))), strict=False))
        self._pages.append(sent)
        self._held += sent.nbytes
        if self._held > self._swept + _MOST_HELD:
            self._sweep()
        return sent

    def _sweep(self) -> None:
        """Lets go of what no block holds any more: its memory is as good as free."""
        kept: list[Sent] = []
        for sent in self._pages:
            if any(sys.getrefcount(tensor) > 3 for tensor in sent.tensors):  # the list, the loop and the call
                kept.append(sent)
            else:
                self._forget(sent)
        self._pages, self._swept = kept, self._held
        held = set(kept)
        self._together = deque(sent for sent in self._together if sent in held)

    def _forget(self, sent: Sent) -> None:
        self._held -= sent.nbytes
        for tensor in sent.tensors:
            self._known.pop(id(tensor), None)

    def find(self, values: Sequence[Any]) -> list[torch.Tensor | None]:
        """The tensors among ``values`` on the host; None for what was not sent, or was changed since."""
        found: list[torch.Tensor | None] = []
        for value, entry in zip(values, map(self._known.get, map(id, values)), strict=True):
            if entry is None or value._version != entry[0].versions[entry[1]]:
                found.append(None)
            else:
                sent, number = entry
                found.append((sent.found or sent.take_apart())[number])
        return found

    def clear(self) -> None:
        """Nothing that was sent is going to be asked for any more."""
        self._known.clear()
        self._pages.clear()
        self._together.clear()
        self._parcels.clear()
        self._held = self._swept = 0

    def _copied(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Copies under way into memory of the host, and when they have arrived."""
        device = tensors[0].device
        with torch.inference_mode(False), torch.no_grad():
            if device.type != "cuda":
                hosts = [each.clone() for each in tensors]
                self._count(hosts)
                return hosts, None
            if self._stream is None:
                lock_by_threads()
                self._stream = torch.cuda.Stream(device)
            hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            self._count(hosts)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _of_lists._foreach_copy_(hosts, tensors, non_blocking=True)
                for each in {each.untyped_storage().data_ptr(): each for each in tensors}.values():
                    each.record_stream(self._stream)
                arrived = torch.cuda.Event(blocking=True)
                arrived.record()
            return hosts, arrived

    def _count(self, hosts: Sequence[torch.Tensor]) -> None:
        for host in hosts:
            self._pinned.take(host.nbytes)
            weakref.finalize(host, self._pinned.give_back, host.nbytes)
