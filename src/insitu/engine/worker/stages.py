"""The stages of a pipeline-parallel model as vLLM sets them up, and what they send each other."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_pp_group
from vllm.platforms import current_platform

from insitu.run.stage_follower import StageFollower
from insitu.run.stage_leader import StageLeader
from insitu.run.stages import report_of
from insitu.run.standard_names import OF_LAYER, OF_MODEL

_ALIGNED = 16
_UNDER_WAY = 256


def stage_of(
    runner: Any, model: torch.nn.Module, unembed: Callable[..., Any], safe_ids: int
) -> StageLeader | StageFollower:
    """The interleaver of this stage. To be called on all at once."""
    link = StageLink()
    stage = (StageFollower if link.stage else StageLeader)(model, unembed, safe_ids, link)
    stage.meet(report_of(stage.modules, stage.anatomy, OF_MODEL, OF_LAYER))
    if current_platform.is_cpu() and link.stage and runner.intermediate_tensors is None:
        # vLLM makes them in a warm-up that it skips on CPUs, where the first step then fails.
        make: Any = model.make_empty_intermediate_tensors
        runner.intermediate_tensors = make(runner.max_num_tokens, runner.model_config.dtype, runner.device)
    return stage


def take_turns(worker: Any, adapter: Any) -> None:
    """A later stage does what blocks ask for before it waits for the one before it, and says when it fails."""
    stage = adapter.interleaver
    if not isinstance(stage, StageFollower):
        return

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                stage.fail(error)
                raise

        return step

    execute_model = worker.execute_model

    def begin_and_execute(scheduled: Any) -> Any:
        adapter.begin(scheduled)
        return execute_model(scheduled)

    worker.execute_model = told(begin_and_execute)
    worker.sample_tokens = told(worker.sample_tokens)


class StageLink:
    """Messages through the host, in a process group of their own. Sending waits for nobody.

    They are between the workers of one engine, as vLLM's own are, which are pickled too.
    """

    def __init__(self) -> None:
        group = get_pp_group()
        self.stage: int = group.rank_in_group
        self.stages: int = group.world_size
        self._ranks = group.ranks
        self._group: Any = dist.new_group(group.ranks, backend="gloo")
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, stage: int, message: Any) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(message)
        tensors = [each.detach().cpu().contiguous() for each in pickler.tensors]
        parts = [torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8), *map(_bytes_of, tensors)]
        about = [(each.dtype, tuple(each.shape)) for each in tensors]
        head = pickle.dumps(([len(part) for part in parts], about))
        self._post(stage, torch.tensor([len(head), sum(map(len, parts))]))
        self._post(stage, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        self._post(stage, torch.cat(parts))

    def receive(self, stage: int) -> Any:
        sizes = torch.empty(2, dtype=torch.int64)
        self._take(stage, sizes)
        head, body = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
        self._take(stage, head)
        self._take(stage, body)
        lengths, about = pickle.loads(head.numpy().tobytes())
        message, *parts = body.split(lengths)
        tensors = [_tensor_of(part, *each) for part, each in zip(parts, about, strict=True)]
        return _Unpickler(io.BytesIO(message.numpy().tobytes()), tensors).load()

    def _post(self, stage: int, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, self._ranks[stage], group=self._group)
        self._under_way.append((work, tensor))
        if len(self._under_way) > _UNDER_WAY:
            self._under_way.popleft()[0].wait()

    def _take(self, stage: int, tensor: torch.Tensor) -> None:
        dist.recv(tensor, self._ranks[stage], group=self._group)


class _Pickler(pickle.Pickler):
    """Leaves tensors out. Numbers and texts, of which there are many, it is not asked about."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        self.tensors.append(obj)
        return _left_out, (len(self.tensors) - 1,)


def _left_out(number: int) -> torch.Tensor:
    """Stands in a message for a tensor that comes beside it."""
    raise NotImplementedError(f"tensor {number} is beside the message")


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _left_out.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _ALIGNED))


def _tensor_of(part: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return part[:count].clone().view(dtype).reshape(shape)
