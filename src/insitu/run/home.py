"""Brings tensors from the device to the host: many in one copy, large ones while the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from insitu.run.memory import require_memory

FEW, _SMALL = 4, 2**18
_MOST = 2**31
_WHAT = "a tensor to be brought home"


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, dicts and tuples, however deep and whether or not they hold themselves."""
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif (type(part) in (list, dict) or isinstance(part, tuple)) and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)


def brought_together(values: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Small tensors of a device, each with its copy on the CPU: one transfer for those that are alike, such as the
    rows of one place in each step."""
    alike: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
    for each in values:
        if type(each) is torch.Tensor and each.device.type != "cpu" and _is_plain(each) and each.nbytes <= _SMALL:
            alike.setdefault((each.shape, each.dtype, each.device), {})[id(each)] = each
    for group in alike.values():
        if len(group) >= FEW:
            tensors = list(group.values())
            for each in tensors:
                require_memory(each, _WHAT)
            with torch.inference_mode(False):
                copies: Any = torch.unbind_copy(torch.stack(tensors).cpu())
            yield from zip(tensors, copies, strict=True)


class Ahead:
    """The tensors of a block that has ended, on their way to the host while its request goes on.

    Through pinned memory on a stream of its own; from there another thread copies them to ordinary memory.
    """

    _stream: ClassVar[torch.cuda.Stream | None] = None
    _thread: ClassVar[ThreadPoolExecutor | None] = None
    _under_way: ClassVar[int] = 0

    def __init__(self, values: Any) -> None:
        self._found: dict[int, tuple[torch.Tensor, int, Future[torch.Tensor]]] = {}
        tensors = {id(each): each for each in tensors_within(values) if _is_worth_it(each)}
        self._bytes = sum(each.nbytes for each in tensors.values())
        if not tensors or Ahead._under_way + self._bytes > _MOST:
            self._bytes = 0
            return
        Ahead._under_way += self._bytes
        self._send(list(tensors.values()))

    def _send(self, tensors: list[torch.Tensor]) -> None:
        if Ahead._stream is None or Ahead._thread is None:
            Ahead._stream, Ahead._thread = torch.cuda.Stream(), ThreadPoolExecutor(1, "insitu-home")
        Ahead._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(False), torch.cuda.stream(Ahead._stream):
            for tensor in tensors:
                require_memory(tensor, _WHAT)
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                pinned.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(Ahead._stream)
                done = torch.cuda.Event()
                done.record()
                copy = Ahead._thread.submit(_copied, pinned, done)
                self._found[id(tensor)] = (tensor, tensor._version, copy)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor on the host, if it was sent and is as it was then."""
        sent = self._found.get(id(tensor))
        return sent[2].result() if sent is not None and sent[1] == tensor._version else None

    def __del__(self) -> None:
        Ahead._under_way -= self._bytes


def _is_worth_it(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.is_cuda and _is_plain(tensor)
    return plain and tensor.nbytes >= _SMALL and not tensor.is_inference()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.requires_grad


def _copied(pinned: torch.Tensor, done: torch.cuda.Event) -> torch.Tensor:
    done.synchronize()
    return pinned.clone()
