"""One greenlet carries many blocks, and nothing of one is left for the next."""

from __future__ import annotations

import gc
import threading
import weakref
from contextvars import ContextVar
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent

from insitu.tree import LOGITS, session_for
from tests.run.packed import Packed, rows

said: ContextVar[str] = ContextVar("said", default="nothing")


def test_a_greenlet_is_used_again_and_its_context_is_new_each_time() -> None:
    packed = Packed()

    def block():
        before = said.get()
        said.set("something")
        packed.nodes.layers[0].output
        return getcurrent(), before

    outer = said.set("outside")
    (first, heard), (second, again) = packed.alone(rows(2), block), packed.alone(rows(3), block)
    said.reset(outer)
    assert first is second
    assert first is not getcurrent()
    assert (heard, again, said.get()) == ("outside", "outside", "nothing")


def test_what_a_block_held_goes_with_its_run() -> None:
    packed = Packed()
    held: list[weakref.ref[object]] = []

    def block():
        kept = packed.nodes.layers[0].output[0]
        said.set(kept)  # type: ignore[arg-type]
        held.append(weakref.ref(kept))
        raise ValueError("with a traceback")

    run = packed.run(block)
    packed.step([(rows(2), run)])
    assert isinstance(run.error, ValueError)
    assert held[0]() is not None
    packed.interleaver.rows = {}
    del run
    gc.collect()
    assert held[0]() is None


def test_blocks_that_wait_at_once_have_greenlets_of_their_own() -> None:
    packed = Packed()

    def block():
        packed.nodes.layers[1].output
        return getcurrent(), session_for("logits").read(LOGITS)

    runs = [packed.run(block) for _ in range(70)]
    packed.step([(rows(1, start), run) for start, run in enumerate(runs)])
    assert len({run.returned[0] for run in runs}) == 70
    values = torch.cat([run.returned[1] for run in runs])
    assert torch.equal(values, torch.cat([packed.alone(rows(1, start), block)[1] for start in range(70)]))


def test_a_killed_block_that_takes_no_notice_ends_with_its_greenlet() -> None:
    packed = Packed()
    seen: list[Any] = []

    def stubborn():
        seen.append(weakref.ref(getcurrent()))
        for layer in packed.nodes.layers:
            try:
                layer.output
            except GreenletExit:
                seen.append("killed")

    run = packed.run(stubborn)
    packed.interleaver.begin([run])
    assert run.waiting is not None
    run.kill()
    gc.collect()  # others may have kept the greenlet, too
    assert run.done
    assert run.error is None
    assert seen[1:] == ["killed", "killed"]
    assert seen[0]() is None


def test_threads_have_greenlets_of_their_own() -> None:
    packed, found = Packed(), []

    def block():
        packed.nodes.layers[0].output
        return getcurrent()

    here = packed.alone(rows(2), block)
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.extend(packed.alone(rows(2), block) for _ in range(2)))
        thread.start()
        thread.join()
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert len({here, found[0], found[2]}) == 3
