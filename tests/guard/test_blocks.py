"""Ordinary Python means under the guard what it means without."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from insitu.block import Saves
from insitu.guard import GuardedBlock, GuardLimits, NotAllowedError, code, compiled
from insitu.net import KeyLimits
from insitu.run.mentions import mentions, text_of
from tests.guard.ordinary import SAME
from tests.guard.running import VALUES, run, source


def plain(text: str) -> dict[str, Any]:
    import math

    namespace: dict[str, Any] = {"torch": torch, "math": math, "y": 0}
    namespace.pop("y")
    exec("from __future__ import annotations\n" + text, namespace)
    return {name: value for name, value in namespace.items() if name not in ("__builtins__", "torch", "math")}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return callable(a) or (type(a) is type(b) and a == b)


@pytest.mark.parametrize("name", SAME)
def test_it_means_the_same(name: str) -> None:
    wanted, found = plain(SAME[name]), run(SAME[name])
    for key in wanted.keys() - {"annotations", "__annotations__"}:
        assert key in found, key
        assert same(wanted[key], found[key]), (key, wanted[key], found[key])


def test_saving_and_lines() -> None:
    block, saves = (
        GuardedBlock(source("a = [].save()\nfor i in range(2):\n    a.append(i)\nb = (1 + 1).save()")),
        Saves(),
    )
    namespace = block.run(VALUES, saves, "__main__")
    assert saves.collect(namespace, block.binds) == {"a": [0, 1], "b": 2}
    with pytest.raises(ZeroDivisionError) as caught:
        run("x = 1\n\ny = [\n    1,\n    x / 0,\n]")
    lines, entry = [], caught.value.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == "<client>block.py":
            lines.append((entry.tb_lineno, entry.tb_frame.f_code.co_name))
        entry = entry.tb_next
    assert lines == [(5, "f")]


def test_a_refusal_says_the_line() -> None:
    with pytest.raises(NotAllowedError, match=r"line 3 of a restricted block: it can't import"):
        run("x = 1\n\nimport os")


def test_what_is_not_used_is_not_in_the_way() -> None:
    assert run("open = 3\nx = open + 1")["x"] == 4
    assert run("x = input + 1", input=2)["x"] == 3
    with pytest.raises(NotAllowedError, match="`open` is not in the list"):
        run("f = lambda: open")


def test_a_block_pickles_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(GuardedBlock(source("x = 1"), GuardLimits(operations=7)))
    monkeypatch.setattr(code, "block_of", None)  # nothing is compiled where it arrives
    block = pickle.loads(sent)
    assert (block.limits.operations, block.source.text.strip(), block.binds) == (7, "x = 1", {"x"})
    assert block.run({}, Saves(), "m")["x"] == 1
    monkeypatch.undo()
    values = pickle.loads(pickle.dumps({**VALUES, "softmax": VALUES["torch"].get("softmax")}))
    assert run("x = softmax(torch.ones(2), 0).tolist()", softmax=values["softmax"])["x"] == [0.5, 0.5]


def test_short_blocks_are_known_by_their_text_and_limits() -> None:
    texts = ("x = 1", "x = 2", "x = 1", "x = 1\n" * 1000)
    first, other, again, long = (GuardedBlock(source(text)).digest for text in texts)
    assert first == again != other
    assert long == ""
    assert GuardedBlock(source("x = 1"), GuardLimits(operations=7)).digest != first


def test_what_is_kept_of_texts_is_bounded_by_their_size() -> None:
    for number in range(30):
        GuardedBlock(source(f"x = {number}\n" + "y = 1234567890123456789012345678901234567890\n" * 1000))
    assert 0 < compiled.block_of._size <= compiled._KEPT
    assert compiled.block_of._size == sum(len(one.text) for one in compiled.block_of._made)


def test_what_a_block_mentions_is_told_as_of_any_other() -> None:
    block = GuardedBlock(source("model.attn_pattern[1]\nfor step in tracer.iter[:]:\n    pass"))

    class Program:
        def __call__(self) -> None: ...

        def text(self) -> Any:
            return block.code, {}

    assert {"attn_pattern", "iter", "tracer", "model"} <= mentions(text_of(Program()))


def test_a_key_has_limits_of_its_own() -> None:
    limits = GuardLimits(operations=5, seconds=1.0).of_key(KeyLimits(operations=9))
    assert (limits.operations, limits.seconds) == (9, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("index", "x[torch.tensor([9])]"),
        ("index_put_", "x[torch.tensor([-9])] = 1"),
        ("gather", "x.gather(0, torch.tensor([9]))"),
        ("index_select", "x.index_select(0, torch.tensor([9]))"),
        ("scatter_", "x.scatter_(0, torch.tensor([9]), 1.0)"),
        ("take", "x.take(torch.tensor([9]))"),
        ("nll_loss_forward", "torch.nn.functional.cross_entropy(x[None], torch.tensor([9]))"),
    ],
)
def test_indices_are_looked_at_before_a_gpu_would_fail_by_them(
    call: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from insitu.guard import watch

    monkeypatch.setattr(watch, "_QUICK", -1)
    check = watch.require_indices
    monkeypatch.setattr(watch.Watch, "_check", lambda self, func, name, args, *_: check(name, args))
    with pytest.raises(IndexError, match=f"`{call}`: index -?9 is out of range for a size of 4"):
        run(f"x = torch.arange(4.)\n{message}")
    for text, error in (
        ("torch.nn.functional.cross_entropy(torch.ones(1, 3), torch.tensor([9]))", IndexError),
        ("torch.multinomial(torch.tensor([-1., 2.]), 1)", ValueError),
        ("x.masked_scatter(x >= 0, torch.ones(1))", IndexError),
    ):
        with pytest.raises(error):
            run(f"x = torch.arange(4.)\n{text}")
    run("torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([1, -100]))")
    run("x = torch.arange(4.)\ny = x[torch.tensor([1, -1])], x[x > 1], x[None, torch.tensor([2])].sum()")


def test_the_whole_text_may_be_indented_as_it_was() -> None:
    text = "        x = 1\n        if x:\n            y = '''a\n  b'''"
    code = type(source("x"))("a.py", 1, "f", "f", text)
    assert GuardedBlock(code).run({}, Saves(), "m")["y"] == "a\n  b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch.multinomial(torch.tensor([1., math.nan]), 1)", "`multinomial` of values that are no probabilities"),
        ("torch.multinomial(torch.zeros(2), 1)", "`multinomial` of values that are all 0"),
        (
            "torch.nn.functional.binary_cross_entropy(torch.tensor([2.]), torch.ones(1))",
            "`binary_cross_entropy` of values that are no probabilities",
        ),
    ],
)
def test_values_are_looked_at_before_a_gpu_would_fail_by_them(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from insitu.guard import watch

    check = watch.require_indices
    monkeypatch.setattr(watch.Watch, "_check", lambda self, func, name, args, *_: check(name, args))
    with pytest.raises(ValueError, match=message):
        run(text)
    run(
        "torch.multinomial(torch.ones(2), 1)\ntorch.nn.functional.cross_entropy(torch.ones(1, 4), torch.tensor([-100]))"
    )
    run("torch.ones(4).masked_scatter(torch.ones(4) > 0, torch.ones(4))")
