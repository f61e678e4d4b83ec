"""Sends values of a device to the host while the engine goes on, so that they are there when they are asked for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import Any

import torch

from insitu.run.home import FEW, SMALL, tensors_within
from insitu.run.memory import require_memory

_MOST_PINNED = 2**32
_MOST_HELD = 2**28
_WHAT = "a tensor to be brought home"


def _on_a_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


class Sent:
    """Tensors under way, and each as it was then. ``copies`` waits for theirs on the host."""

    __slots__ = ("copies", "nbytes", "tensors", "versions")

    def __init__(self, tensors: Sequence[torch.Tensor], copies: Callable[[], Sequence[torch.Tensor]]) -> None:
        self.tensors = tensors
        self.versions = [each._version for each in tensors]
        self.nbytes = sum(each.nbytes for each in tensors)
        self.copies = copies


class Sender:
    """Large tensors go into pinned memory of their own, which is handed over as it is; many small ones alike in one
    transfer, and another thread gives each memory of its own."""

    def __init__(self, is_far: Callable[[torch.Tensor], bool] = _on_a_gpu) -> None:
        self._is_far = is_far
        self.in_use = is_far is not _on_a_gpu or torch.cuda.is_available()
        self._known: dict[int, tuple[Sent, int]] = {}
        self._pages: list[Sent] = []
        self._held = self._swept = 0
        self._pinned = 0
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None

    def send(self, values: Any) -> None:
        """Sends what is in ``values``, which a block is done with."""
        small: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
        for tensor in tensors_within(values):
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
            if not plain or not self._is_far(tensor) or tensor.requires_grad or tensor.is_inference():
                continue
            if id(tensor) in self._known:
                continue
            require_memory(tensor, _WHAT)
            if tensor.nbytes > SMALL:
                self._send_large(tensor)
            else:
                small.setdefault((tensor.shape, tensor.dtype, tensor.device), {})[id(tensor)] = tensor
        for group in small.values():
            if len(group) >= FEW:
                tensors = list(group.values())
                self.send_rows(torch.stack(tensors), tensors)

    def send_rows(self, memory: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
        """Sends ``memory``, along whose first axis ``rows`` lie, or lay."""
        if not rows or not self._is_far(memory):
            return
        host, wait = self._copy(memory)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "insitu-home")
        copies: Future[list[torch.Tensor]] = self._thread.submit(_apart, host, wait, rows[0].shape)
        self._note(Sent(rows, copies.result))

    def _send_large(self, tensor: torch.Tensor) -> None:
        if self._pinned + tensor.nbytes > _MOST_PINNED:
            return
        self._pinned += tensor.nbytes
        host, wait = self._copy(tensor)
        weakref.finalize(host, self._unpinned, tensor.nbytes)
        hosts = [host]

        def copies() -> list[torch.Tensor]:
            wait()
            return hosts

        self._note(Sent([tensor], copies))

    def _unpinned(self, nbytes: int) -> None:
        self._pinned -= nbytes

    def _note(self, sent: Sent) -> None:
        self._known.update(zip(map(id, sent.tensors), zip(repeat(sent), range(len(sent.tensors))), strict=False))
        self._pages.append(sent)
        self._held += sent.nbytes
        if self._held > self._swept + _MOST_HELD:
            self._sweep()

    def _sweep(self) -> None:
        """Lets go of what no block holds any more: its memory is as good as free."""
        kept: list[Sent] = []
        for sent in self._pages:
            if any(sys.getrefcount(tensor) > 3 for tensor in sent.tensors):  # the list, the loop and the call
                kept.append(sent)
            else:
                self._forget(sent)
        self._pages, self._swept = kept, self._held

    def _forget(self, sent: Sent) -> None:
        self._held -= sent.nbytes
        for tensor in sent.tensors:
            self._known.pop(id(tensor), None)

    def find(self, values: Sequence[Any]) -> list[torch.Tensor | None]:
        """The tensors among ``values`` on the host; None for what was not sent, or was changed since."""
        return [
            self._found(each, entry) for each, entry in zip(values, map(self._known.get, map(id, values)), strict=True)
        ]

    def _found(self, value: Any, entry: tuple[Sent, int] | None) -> torch.Tensor | None:
        if entry is None:
            return None
        sent, number = entry
        return sent.copies()[number] if value._version == sent.versions[number] else None

    def clear(self) -> None:
        """Nothing that was sent is going to be asked for any more."""
        self._known.clear()
        self._pages.clear()
        self._held = self._swept = 0

    def _copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """A copy under way into memory of the host, and how to wait for it."""
        with torch.inference_mode(False), torch.no_grad():
            if not tensor.is_cuda:
                return tensor.clone(), _nothing
            if self._stream is None:
                self._stream = torch.cuda.Stream(tensor.device)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
                done = torch.cuda.Event(blocking=True)
                done.record()
            tensor.record_stream(self._stream)
            return host, done.synchronize


def _apart(host: torch.Tensor, wait: Callable[[], None], shape: torch.Size) -> list[torch.Tensor]:
    """Each row with memory of its own."""
    wait()
    copies: Any = torch.unbind_copy(host) if len(shape) == host.dim() - 1 else torch.split_copy(host, 1)
    return list(copies)


def _nothing() -> None:
    return None
