"""Engines with experts in a process that has had one without."""

from __future__ import annotations

import torch
from vllm.distributed import parallel_state


def ensure_expert_group() -> None:
    """vLLM makes its process groups with the first engine of a process, and one for experts only if that has some.

    All engines of a process share them, and each of these groups holds this one rank.
    """
    if not parallel_state.model_parallel_is_initialized() or parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    if world.world_size == 1:
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [[0]], world.local_rank, torch.distributed.get_backend(world.device_group), group_name="ep"
        )
