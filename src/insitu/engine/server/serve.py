"""``insitu serve``: vLLM's own server, with insitu's routes on its engine."""

from __future__ import annotations

import ipaddress
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvloop
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from insitu.block import ArgumentError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.launch import OURS, cpu_memory, refusal
from insitu.engine.client.start_async import attached
from insitu.engine.server.beside import BesideOpenAI
from insitu.engine.server.elsewhere import Elsewhere
from insitu.engine.server.routes import PREFIX, router
from insitu.engine.server.traces import Traces
from insitu.net import Keys, Permission

_LOOPBACK = "127.0.0.1"


class Routes:
    """An endpoint plugin of vLLM's: adds the routes to an app, and gives them its engine."""

    name = "insitu"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        self._app = app
        app.add_middleware(Elsewhere, own=PREFIX)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        if engine_client is None:
            return
        if (error := refusal(args.model, engine_client.vllm_config)) is not None:
            raise error
        model = AsyncVLLM(args.model)
        model._engine = await attached(engine_client, model)
        BesideOpenAI(model).watch(state)
        self._app.include_router(router(model, Traces(model), _keys(args)))
        state.insitu = model


def serve(arguments: Sequence[str]) -> None:
    """Runs the server until it is told to stop. ``arguments`` are those of ``vllm serve``.

    Raises ``ArgumentError`` for another address than loopback without a key, and for what blocks can't run under.
    """
    args = parsed(arguments)
    with _with_routes():
        uvloop.run(api_server.run_server(args))


def parsed(arguments: Sequence[str]) -> Namespace:
    """The arguments as vLLM has them, with what insitu needs of the engine. The address is loopback if left out."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="insitu serve"))
    parser.add_argument("--insitu-keys", metavar="FILE", help="further keys for insitu's routes: docs/security.md")
    args: Any = parser.parse_args(list(arguments))
    validate_parsed_serve_args(args)
    args.model = getattr(args, "model_tag", None) or args.model
    if args.host is None and args.uds is None:
        args.host = _LOOPBACK
    if not (args.uds or _is_loopback(str(args.host)) or any(args.api_key or [])):
        raise ArgumentError(
            f"--host {args.host}: whoever reaches this address could run blocks here. Give --api-key KEY, or leave "
            f"--host out, which serves this machine alone"
        )
    if (args.api_server_count or 1) > 1 or args.data_parallel_size > 1 or args.pipeline_parallel_size > 1:
        raise ArgumentError("insitu serve runs one API server, one pipeline stage and one data parallel rank")
    _keys(args)  # a file that can't be read is told before the engine is built
    for name, value in {**OURS, **cpu_memory(_given(args))}.items():
        setattr(args, name, value)
    return args


def _keys(args: Any) -> Keys:
    """Those of ``--api-key``, which are for vLLM's routes too and may send blocks, and those of the file."""
    keys = Keys.of_texts([key for key in args.api_key or [] if key], Permission.BLOCKS)
    if args.insitu_keys is None:
        return keys
    more = Keys.load(args.insitu_keys)
    for key in more:
        if key.permission == Permission.TRUSTED:
            raise ArgumentError(
                f"--insitu-keys: {key.name!r} may run any code, which this version's server does not "
                f"do: give it the permission 'blocks' or 'form'"
            )
    return Keys([*keys, *more])


def _given(args: Any) -> dict[str, Any]:
    """What of the memory was chosen."""
    chosen = {"kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    return {name: value for name, value in chosen.items() if value is not None}


@contextmanager
def _with_routes() -> Iterator[None]:
    """vLLM loads endpoint plugins by entry point and allow-list; who starts this server has asked for this one."""
    attach = api_server._attach_endpoint_plugins

    def attach_ours(app: Any, supported_tasks: Any) -> None:
        attach(app, supported_tasks)
        ours = Routes()
        ours.attach_router(app)
        app.state.endpoint_plugins = [*app.state.endpoint_plugins, ours]

    api_server._attach_endpoint_plugins = attach_ours
    try:
        yield
    finally:
        api_server._attach_endpoint_plugins = attach


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
