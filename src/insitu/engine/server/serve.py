"""``insitu serve``: vLLM's own server, with insitu's routes on its engine."""

from __future__ import annotations

import asyncio
import getpass
import ipaddress
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import uvloop
from vllm import envs
from vllm.entrypoints.cli.serve import (
    make_arg_parser,  # pyright: ignore[reportPrivateImportUsage]
    run_server,  # pyright: ignore[reportPrivateImportUsage]
    validate_parsed_serve_args,  # pyright: ignore[reportPrivateImportUsage]
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

from insitu.block import ArgumentError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.copies import require_one_front
from insitu.engine.client.launch import OURS, cpu_memory, refusal
from insitu.engine.client.start_async import attached
from insitu.engine.server.access import Access
from insitu.engine.server.beside import BesideOpenAI
from insitu.engine.server.elsewhere import Elsewhere
from insitu.engine.server.entry import attaching
from insitu.engine.server.metrics import EngineMetrics
from insitu.engine.server.routes import PREFIX, router
from insitu.engine.server.streams import watch_streams
from insitu.engine.server.traces import Traces
from insitu.net import Keys, Permission

LOOPBACK = "127.0.0.1"
_TRUSTING = """\
insitu: --trust-code: blocks are neither checked nor limited. Whoever has a key that may send them, or without keys
whoever reaches this address, can run any code here as {user} on {machine}: read its files and the requests of
others, use its network, change this server. Keys of --api-key may; those of a file may what their permission
says. Nothing is unpickled."""


_KEEP_ALIVE = "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
_UNHEALTHY_FOR = 10.0
"""Seconds."""


class Routes:
    """An endpoint plugin of vLLM's: adds the routes to an app, and gives them its engine."""

    name = "insitu"
    required_tasks: tuple[str, ...] = ("generate",)
    _metrics: EngineMetrics | None = None
    _watching: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        self._app = app
        app.add_middleware(Elsewhere, own=PREFIX, before_metrics=self._before_metrics)

    async def _before_metrics(self) -> None:
        if self._metrics is not None:
            await self._metrics.refresh()

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        if engine_client is None:
            return
        if (error := refusal(args.model, engine_client.vllm_config)) is not None:
            raise error
        model = AsyncVLLM(args.model)
        model._engine = await attached(engine_client, model)
        self._metrics = EngineMetrics(model)
        access = Access(_keys(args), _permission(args))
        BesideOpenAI(model, access).watch(state)
        watch_streams(state)
        traces = Traces(model, adapters=lambda: state.openai_serving_models.lora_requests)
        self._app.include_router(router(model, traces, access))
        state.insitu = model
        if _KEEP_ALIVE not in os.environ:
            os.environ[_KEEP_ALIVE] = "1"
            self._watching = asyncio.create_task(self._end_unhealthy(engine_client))

    async def _end_unhealthy(self, engine_client: Any) -> None:
        """vLLM ends its server at once when the engine has died, before anybody could ask what is wrong."""
        while not engine_client.errored:
            await asyncio.sleep(1)
        await asyncio.sleep(_UNHEALTHY_FOR)
        self._app.state.server.should_exit = True


def serve(arguments: Sequence[str]) -> None:
    """Runs the server until it is told to stop. ``arguments`` are those of ``vllm serve``.

    Raises ``ArgumentError`` for another address than loopback without a key, and for what blocks can't run under.
    """
    args = parsed(arguments)
    add_routes(sys.modules[run_server.__module__])
    uvloop.run(run_server(args))


def parsed(arguments: Sequence[str]) -> Namespace:
    """The arguments as vLLM has them, with what insitu needs of the engine. The address is loopback if left out."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="insitu serve"))
    parser.add_argument("--insitu-keys", metavar="FILE", help="further keys for insitu's routes: docs/security.md")
    parser.add_argument("--trust-code", action="store_true", help="take any code, not restricted blocks alone")
    args: Any = parser.parse_args(list(arguments))
    validate_parsed_serve_args(args)
    args.model = getattr(args, "model_tag", None) or args.model
    if args.host is None and args.uds is None:
        args.host = LOOPBACK
    adapt(args)
    return args


def adapt(args: Any) -> None:
    """Sets what insitu needs of the engine. Raises ``ArgumentError`` for what it can't be served under."""
    if not (args.uds or _is_loopback(str(args.host)) or _given_keys(args)):
        raise ArgumentError(
            f"--host {args.host}: whoever reaches this address could run blocks here. Give --api-key KEY, or serve "
            f"this machine alone with --host {LOOPBACK}, as `insitu serve` does if --host is left out"
        )
    if (args.api_server_count or 1) > 1:
        raise ArgumentError(
            f"--api-server-count {args.api_server_count}: edits and traces are known to one API server, which has all "
            f"copies of the model behind it: give --api-server-count 1, or serve with `insitu serve`, where it is 1"
        )
    require_one_front(vars(args))
    _keys(args)  # a file that can't be read is told before the engine is built
    if _permission(args) == Permission.TRUSTED:
        print(_TRUSTING.format(user=getpass.getuser(), machine=socket.gethostname()), file=sys.stderr, flush=True)
    for name, value in {**OURS, **cpu_memory(_given(args))}.items():
        setattr(args, name, value)


def _given_keys(args: Any) -> list[str]:
    """Those of vLLM's own routes."""
    return [key for key in args.api_key or [envs.VLLM_API_KEY] if key]


def _keys(args: Any) -> Keys:
    """Those of ``--api-key``, which are for vLLM's routes too and may send blocks, and those of the file."""
    keys = Keys.of_texts(_given_keys(args), _permission(args))
    file = getattr(args, "insitu_keys", None) or os.environ.get("INSITU_KEYS")
    if not file:
        return keys
    more = Keys.load(file)
    for key in more:
        if key.permission > _permission(args):
            raise ArgumentError(
                f"the file of keys: {key.name!r} may run any code, which a server takes that was started with "
                f"--trust-code: give it the permission 'blocks' or 'form', or start with that"
            )
    return Keys([*keys, *more])


def _permission(args: Any) -> Permission:
    """That of the keys of vLLM's own routes, and of everybody where there are no keys."""
    trusting = getattr(args, "trust_code", False) or os.environ.get("INSITU_TRUST_CODE", "0") not in ("", "0")
    return Permission.TRUSTED if trusting else Permission.BLOCKS


def _given(args: Any) -> dict[str, Any]:
    """What of the memory was chosen."""
    chosen = {"kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    return {name: value for name, value in chosen.items() if value is not None}


def add_routes(entry: Any) -> None:
    """vLLM loads endpoint plugins by entry point and allow-list; who starts this server has asked for this one.

    ``entry``: the module that starts it. A second time does nothing. Raises ``EngineError`` as ``attaching``.
    """
    module, name = attaching(entry)
    attach = getattr(module, name)
    if getattr(attach, "is_insitu", False):
        return

    def attach_ours(app: Any, supported_tasks: Any) -> None:
        attach(app, supported_tasks)
        ours = Routes()
        ours.attach_router(app)
        app.state.endpoint_plugins = [*app.state.endpoint_plugins, ours]

    attach_ours.is_insitu = True  # type: ignore[attr-defined]
    setattr(module, name, attach_ours)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
