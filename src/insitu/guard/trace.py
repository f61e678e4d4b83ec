"""A request's blocks, restricted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from insitu.block.containers import changed, copied
from insitu.guard.allowed import resolved
from insitu.guard.code import GuardedBlock, GuardedFunction, require_public
from insitu.guard.errors import NotAllowedError
from insitu.guard.limits import GuardLimits
from insitu.net.limits import WireLimits
from insitu.net.refs import FunctionRef, Named, Ref
from insitu.net.requests import TraceRequest

__all__ = ["RestrictedInvoke", "restricted"]


@dataclass(frozen=True)
class RestrictedInvoke:
    """One invoke of a request, ready to become a job. ``block`` is a function's for the function form."""

    prompt: Any
    sampling: dict[str, Any]
    block: GuardedBlock | GuardedFunction
    values: dict[str, Any]
    shared: tuple[str, ...]
    before: dict[str, Any] = field(repr=False)
    """Copies of the values, to tell what the block has changed."""

    def changed(self) -> list[str]:
        """Names of lists, dicts and sets of the caller's that the block has changed, saved or not: what the client
        is to be told of, since its own are as before."""
        return changed(self.values, self.before)


def restricted(
    request: TraceRequest,
    named: Callable[[Named], Any],
    limits: GuardLimits | None = None,
    wire: WireLimits | None = None,
) -> list[RestrictedInvoke]:
    """The invokes of a request. ``named`` gives the server's own model, nodes and tracer.

    Raises, before anything runs, ``WireError`` for what is no request and ``NotAllowedError`` for a block that
    holds what it may not.
    """
    limits = limits or GuardLimits()
    functions = [GuardedFunction(one.code, limits) for one in request.functions]

    def resolve(ref: Ref) -> Any:
        if isinstance(ref, FunctionRef):
            if ref.number >= len(functions):
                raise NotAllowedError("a value names a function that has not come")
            return functions[ref.number]
        return named(ref) if isinstance(ref, Named) else resolved(ref)

    decoded = request.decoded(resolve, wire)
    for function, values in zip(functions, decoded.functions, strict=True):
        function.names, function.defaults, function.kwdefaults = values.names, values.defaults, values.kwdefaults
        require_public(values.names)
        function.check()
    made = []
    for one, values in zip(request.invokes, decoded.invokes, strict=True):
        block: GuardedBlock | GuardedFunction
        if one.block is None:
            assert one.function is not None
            block = functions[one.function]
        else:
            block = GuardedBlock(one.block, limits)
            require_public(values.values)
            block.check(values.values)
        given, before = values.values, copied(values.values)
        made.append(RestrictedInvoke(values.prompt, values.sampling, block, given, tuple(one.shared), before))
    return made
