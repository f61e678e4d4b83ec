"""Starts vLLM's asynchronous engine, whose core is a process of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.network_utils import get_open_zmq_inproc_path, make_zmq_socket
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from insitu.block import ArgumentError
from insitu.engine.channel import AsyncWired
from insitu.engine.client.async_engine import AsyncEngine
from insitu.engine.client.copies import Copies, only
from insitu.engine.client.launch import checked_args, refusal
from insitu.engine.client.one_loop import OneLoop, in_a_loop_of_its_own
from insitu.engine.client.waited import Waited
from insitu.engine.standin import ClientSide
from insitu.engine.taps.check import check_taps


def start_async(
    repo: str, engine_args: Mapping[str, Any], taps: Sequence[str], model: Any, workers: bool | None
) -> AsyncEngine:
    """The engine, started and not yet bound to an event loop. ``workers``: whether the model runs in further
    processes; None: if it must."""
    if workers is False:
        raise ArgumentError("engine='in-process': the core of an async engine is always a process of its own")
    args = checked_args(repo, engine_args, taps, bool(workers), AsyncEngineArgs)
    return in_a_loop_of_its_own(lambda: _started(repo, args, taps, model))


async def _started(repo: str, args: Mapping[str, Any], taps: Sequence[str], model: Any) -> AsyncEngine:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=repo, **{"disable_log_stats": True, **args}))
    try:
        if (error := refusal(repo, llm.vllm_config)) is not None:
            raise error
        engine = await attached(llm, model)
        for copy in range(engine.copies) if taps else ():
            waited: Any = Waited(engine, asyncio.get_running_loop())
            with only(copy):
                await asyncio.to_thread(check_taps, waited, threading.RLock())
        await _unbound(llm)
        engine.home.leave()
    except BaseException:
        llm.shutdown()
        raise
    return engine


async def attached(llm: AsyncLLM, model: Any) -> AsyncEngine:
    """The engine of ``model``, on this event loop, around vLLM's own."""
    home = OneLoop()
    core: Any = llm.engine_core
    channel: Any
    if isinstance(core, DPLBAsyncMPClient):
        channel = Copies(core, [AsyncWired(llm, ClientSide(model), home.enter, each) for each in core.core_engines])
    else:
        channel = AsyncWired(llm, ClientSide(model), home.enter)
    await channel.open()
    engine = AsyncEngine(llm, channel, model._owner, home)
    engine.outline, engine.layers = await channel.call("insitu_outline")
    engine.watch()
    return engine


async def _unbound(llm: AsyncLLM) -> None:
    """Ends the tasks that vLLM runs on this loop; it makes new ones on the loop on which it is next used."""
    core: Any = llm.engine_core
    made = (core.resources.output_queue_task, core.resources.stats_update_task, llm.output_handler)
    tasks = [task for task in made if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    core.resources.output_queue_task = llm.output_handler = None
    core.outputs_queue = asyncio.Queue()
    if core.resources.stats_update_task is not None:  # it held the other end of a socket that takes only one
        core.resources.stats_update_task = None
        about = "first_req" if hasattr(core, "first_req_send_socket") else "scale"  # its name since 0.33
        getattr(core, f"{about}_send_socket").close(linger=0)
        address = get_open_zmq_inproc_path()
        made_anew = make_zmq_socket(core.ctx, address, zmq.PAIR, bind=True)
        setattr(core, f"{about}_sock_addr", address)
        for holder in (core, core.resources):
            setattr(holder, f"{about}_send_socket", made_anew)
