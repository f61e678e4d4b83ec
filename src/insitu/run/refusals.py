"""What a block is told when a place can't be served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from insitu.block import LocationError, NotReachedError, OutOfOrderError, SharedModuleError
from insitu.run.modules import ModuleTable
from insitu.tree import Place

if TYPE_CHECKING:
    from insitu.run.block_run import BlockRun


def after_result(place: Place) -> OutOfOrderError:
    return OutOfOrderError(f"`{place}` can't be read after `tracer.result`, which comes last")


def inside_skipped(place: Place, skipped: Place) -> OutOfOrderError:
    return OutOfOrderError(f"`{place}` can't be read: it is inside `{skipped.call}`, which is skipped for this request")


def require_not_skipped(place: Place, others: Iterable[BlockRun]) -> None:
    """Raises if the call that is under way is one that a block beside the same request skips."""
    for other in others:
        if other.skipping and other.waiting is not None and place.is_inside(other.waiting):
            raise inside_skipped(place, other.waiting)


def gone_by(place: Place, at: Place | None) -> OutOfOrderError:
    after = f" The block is at `{at}`, which comes after it." if at else ""
    return OutOfOrderError(
        f"`{place}` has gone by in this step.{after} Places are read in the order of the forward: "
        f"move this read up, to where the model gets there"
    )


def gone_by_at_the_end(place: Place) -> OutOfOrderError:
    return OutOfOrderError(f"`{place}` has gone by in this step: this step's forward is over")


def holds_state(path: str, module: torch.nn.Module) -> LocationError:
    return LocationError(
        f"`{path}` ({type(module).__name__}) can't be called on values of the block: it writes to the KV "
        f"cache, where the running requests keep their own; call the parts of it that only compute"
    )


def shared(place: Place, paths: list[str]) -> SharedModuleError:
    other = next(path for path in paths if path != place.path)
    return SharedModuleError(
        f"`{place.path}` is one module shared under {len(paths)} paths (`{other}` is another), and "
        f"this step's calls of it were under others or can't be told apart; read a place of the "
        f"module that calls it instead"
    )


def missed(place: Place, modules: ModuleTable, called: bool, passed: bool) -> LocationError:
    """``called``: the module of ``place`` was; ``passed``: the operation that it is has gone by."""
    module = modules[place.path]
    if called and modules.is_shared(place.path):
        return shared(place, modules.paths_of(module))
    return gone_by_at_the_end(place) if passed else unreached(place, module, called=bool(place.op) and called)


def left_over(place: Place, kind: str, called: bool) -> LocationError:
    """Where the forward has several stages, and none has come to ``place`` since the block waits there."""
    return gone_by_at_the_end(place) if called else _unreached(place, kind, called=False)


def unreached(place: Place, module: torch.nn.Module, called: bool) -> NotReachedError:
    """``called``: the module was, but the forward did not come to an operation in it."""
    return _unreached(place, type(module).__name__, called)


def _unreached(place: Place, kind: str, called: bool) -> NotReachedError:
    where = f"`{place.path}` ({kind})"
    missed = f"did not come to it in {where}" if called else f"never called {where}"
    return NotReachedError(f"`{place}` was not reached: this step's forward is over and {missed}")


def ended(place: Place, step: int, steps: int) -> NotReachedError:
    count = f"{steps} step{'' if steps == 1 else 's'}"
    return NotReachedError(f"`{place}` of step {step} was not reached: the request ended after {count}")
