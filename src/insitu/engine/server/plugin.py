"""A general plugin of vLLM's: with ``INSITU_SERVE=1``, a plain ``vllm serve MODEL`` has insitu's routes.

vLLM calls ``register`` in each of its processes. Without the variable, and where no server is, it does nothing.
"""

from __future__ import annotations

import os
from typing import Any

from vllm import envs

from insitu.block import EngineError
from insitu.engine.server.entry import entries


def register() -> None:
    """Raises ``EngineError`` at a server of vLLM's to which insitu can't add its routes."""
    if os.environ.get("INSITU_SERVE", "0") in ("", "0"):
        return
    for entry in entries():
        if envs.VLLM_USE_RUST_FRONTEND:
            raise EngineError(
                "VLLM_USE_RUST_FRONTEND: vLLM's server in Rust has no place for insitu's routes: leave it out, or use "
                "`insitu serve`, which runs the one in Python"
            )
        _into(entry)


def _into(entry: Any) -> None:
    # Imported here: most processes that load plugins are no servers.
    from insitu.engine.server.serve import adapt, add_routes

    if getattr(entry.build_async_engine_client, "is_insitu", False):
        return
    build = entry.build_async_engine_client

    def adapted(args: Any, **settings: Any) -> Any:
        adapt(args)
        return build(args, **settings)

    adapted.is_insitu = True  # type: ignore[attr-defined]
    entry.build_async_engine_client = adapted
    add_routes(entry)
