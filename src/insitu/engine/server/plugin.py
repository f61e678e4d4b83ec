"""A general plugin of vLLM's: with ``INSITU_SERVE=1``, a plain ``vllm serve MODEL`` has insitu's routes.

vLLM calls ``register`` in each of its processes. Without the variable, and where no server is, it does nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import vllm

from insitu.block import EngineError

_SERVERS = ("vllm.entrypoints.openai.api_server", "__main__")
"""Names that vLLM's server has, imported or started with ``python -m``."""
_MOVED = "vllm.entrypoints.launchers"
"""Where it is in 0.32."""


def register() -> None:
    """Raises ``EngineError`` at a server of vLLM's that insitu does not know."""
    if os.environ.get("INSITU_SERVE", "0") in ("", "0"):
        return
    if f"{_MOVED}.api_server.entry" in sys.modules:
        require_known_server()
    for module in (sys.modules.get(name) for name in _SERVERS):
        if hasattr(module, "_attach_endpoint_plugins") and hasattr(module, "build_async_engine_client"):
            _into(module)


def require_known_server() -> None:
    """Raises ``EngineError`` if this vLLM has another server than the one to which insitu adds its routes."""
    if find_spec(_MOVED) is not None:
        raise EngineError(
            f"vLLM {vllm.__version__} has another server than the one to which insitu adds its routes: serve with vLLM "
            f"0.27, or load the model with insitu.VLLM(..., mode='async'), which needs no server"
        )


def _into(module: Any) -> None:
    # Imported here: most processes that load plugins are no servers.
    from insitu.engine.server.serve import adapt, add_routes

    if getattr(module.build_async_engine_client, "is_insitu", False):
        return
    build = module.build_async_engine_client

    def adapted(args: Any, **settings: Any) -> Any:
        adapt(args)
        return build(args, **settings)

    adapted.is_insitu = True  # type: ignore[attr-defined]
    module.build_async_engine_client = adapted
    add_routes(module)
