"""What can't be written is refused, with the place, what is wanted there and what was got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import insitu
from tests.engine.helpers import (
    PROMPT,
    assert_close,
    hf_stream,
    ids_of,
)
from tests.models import WIDTH


def refusals(rows: int) -> dict[str, tuple[Callable[[torch.Tensor], Any], list[str]]]:
    """What is written over `[rows, WIDTH]`, and what the error must say it got."""
    shape = f"({rows}, {WIDTH})"
    return {
        "too few rows": (lambda x: x[:-1], [f"({rows - 1}, {WIDTH})", shape]),
        "too narrow": (lambda x: x[:, :3], [f"({rows}, 3)", shape]),
        "batch axis": (lambda x: x[None], [f"(1, {rows}, {WIDTH})", shape]),
        "one row": (lambda x: x[0], [f"({WIDTH},)", shape]),
        "integers": (lambda x: torch.zeros(x.shape, dtype=torch.int64), ["torch.float32", "torch.int64"]),
        "booleans": (lambda x: x > 0, ["torch.float32", "torch.bool"]),
        "complex": (lambda x: x.to(torch.complex64), ["torch.float32", "torch.complex64"]),
        "array": (lambda x: x.numpy(), [shape, "ndarray"]),
        "list": (lambda x: x.tolist(), [shape, "list"]),
        "number": (lambda x: 0.0, [shape, "float", "0.0"]),
        "nothing": (lambda x: None, [shape, "None"]),
        "pair": (lambda x: (x, x), [shape, "tuple of 2"]),
    }


@pytest.mark.parametrize("case", list(refusals(0)))
def test_what_does_not_fit_is_refused_with_place_wanted_and_got(llama: Any, case: str) -> None:
    make, words = refusals(len(ids_of("llama")))[case]
    mlp = llama.model.layers[1].mlp

    def block(tracer: Any) -> None:
        mlp.output = make(mlp.output)

    with pytest.raises(insitu.WriteError) as caught:
        llama.run(block, PROMPT, max_tokens=1)
    for word in ["model.layers.1.mlp.output", *words]:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert caught.traceback[-1].name == "block"


@pytest.mark.parametrize("resize", ["t_", "unsqueeze_", "resize_"])
def test_a_value_resized_in_place_is_refused(llama: Any, resize: str) -> None:
    arguments = {"t_": (), "unsqueeze_": (0,), "resize_": (1, 1)}[resize]

    def block(tracer: Any) -> None:
        getattr(llama.model.layers[1].mlp.output, resize)(*arguments)

    with pytest.raises(insitu.WriteError, match=r"model\.layers\.1\.mlp\.output.*resized"):
        llama.run(block, PROMPT, max_tokens=1)


STRUCTURES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "tensor for a pair": (lambda pair: pair[0], ["tuple of 2", "shape"]),
    "three for two": (lambda pair: (*pair, pair[0]), ["tuple of 2", "tuple of 3"]),
    "one for two": (lambda pair: pair[:1], ["tuple of 2", "tuple of 1"]),
    "dict for a pair": (lambda pair: {"hidden": pair[0]}, ["tuple of 2", "dict with hidden"]),
    "second of another shape": (lambda pair: (pair[0], pair[1][1:]), ["output[1]", f"{WIDTH})"]),
}


@pytest.mark.parametrize("case", list(STRUCTURES))
def test_another_structure_is_refused(llama: Any, case: str) -> None:
    make, words = STRUCTURES[case]
    layer = llama.model.layers[1]

    def block(tracer: Any) -> None:
        layer.output = make(layer.output)

    with pytest.raises(insitu.WriteError) as caught:
        llama.run(block, PROMPT, max_tokens=1)
    for word in ["model.layers.1.output", *words]:
        assert word in str(caught.value)


def test_arguments_that_are_no_tensors_are_kept(llama: Any) -> None:
    trunk = llama.model

    def replaced(value: Any) -> Callable[[Any], Any]:
        def block(tracer: Any) -> torch.Tensor:
            (ids, positions, *others), kwargs = trunk.inputs
            assert others == [None, None]
            trunk.inputs = (ids, positions, None, value), kwargs
            return llama.logits

        return block

    assert_close(llama.run(replaced(None), PROMPT, max_tokens=1), hf_stream("llama", ids_of("llama")).logits[-1:])
    for value in (torch.zeros(3), 5, "text"):
        with pytest.raises(insitu.WriteError, match="can't be replaced"):
            llama.run(replaced(value), PROMPT, max_tokens=1)


def test_ids_are_replaced_by_ids(llama: Any) -> None:
    other = [*ids_of("llama")[:-2], 77, 78]
    embedding = llama.model.embed_tokens
    with llama.trace(max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            embedding.input = torch.tensor(other, dtype=torch.int32)
            logits = llama.logits.save()
        with tracer.invoke(PROMPT):
            embedding.input[-2:] = torch.tensor([77, 78])
            logits = llama.logits.save()
        with tracer.invoke(PROMPT):
            logits = llama.logits.save()
    for found, ids in zip(logits, (other, other, ids_of("llama")), strict=True):
        assert_close(found, hf_stream("llama", ids).logits[-1:])


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.1.self_attn.rotary_emb"])
@pytest.mark.parametrize("index", [-1, 512, 10**9])
def test_ids_and_positions_out_of_range_are_refused(llama: Any, path: str, index: int) -> None:
    """vLLM looks them up unchecked, so that a wrong one would end the engine for everybody."""
    module = llama.get(path)

    def replaced(tracer: Any) -> None:
        module.input = module.input * 0 + index

    def in_place(tracer: Any) -> None:
        module.input[0] = index

    for block in (replaced, in_place):
        with pytest.raises(insitu.WriteError, match=rf"{path}\.input takes ids or positions, 0 to \d+; got {index}"):
            llama.run(block, PROMPT, max_tokens=1)
    assert_close(
        llama.run(lambda tracer: llama.logits, PROMPT, max_tokens=1),
        hf_stream("llama", ids_of("llama")).logits[-1:],
    )


def test_a_refused_write_leaves_the_engine_and_the_others_alone(llama: Any) -> None:
    found = []
    with pytest.raises(insitu.WriteError) as caught, llama.trace(max_tokens=1) as tracer:
        found = [].save()
        for i in range(4):
            with tracer.invoke(PROMPT):
                mlp = llama.model.layers[1].mlp
                mlp.output = mlp.output[1:] if i == 2 else mlp.output
                found.append(llama.logits)
    assert caught.value.invoke == 2
    assert len(found) == 3
    for logits in found:
        assert_close(logits, hf_stream("llama", ids_of("llama")).logits[-1:])
    assert llama.in_flight() == 0
