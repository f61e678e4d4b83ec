"""Standard names: refusals where they are not known, and how writes go back into the parts of a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from insitu import LocationError, WriteError
from insitu.run.anatomy import Anatomy
from insitu.run.derived import Derived
from insitu.run.modules import ModuleTable
from insitu.run.stream import Stream
from insitu.tree import Place


def model(kind: str, paths: list[str], **config: Any) -> Anatomy:
    """The names of a model of class ``kind`` with modules at ``paths``."""
    root = type(kind, (nn.Module,), {})()
    root.config = SimpleNamespace(**config)
    for path in paths:
        parent = root
        for name in path.split("."):
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent._modules[name]
    return Anatomy(ModuleTable(root))


def test_an_unknown_architecture_is_refused_by_name() -> None:
    anatomy = model("StrangeForCausalLM", ["model.layers.0"])
    assert anatomy.layers == 0
    for name in ("embed", "resid_post", "router_logits"):
        with pytest.raises(
            LocationError, match=rf"`model.{name}` is not known for StrangeForCausalLM: .*LlamaForCausalLM"
        ):
            anatomy.stream(name, 0)
    with pytest.raises(LocationError, match="StrangeForCausalLM"):
        _ = anatomy.norm


def test_a_config_decides_where_it_must() -> None:
    layers = ["gpt_neox.layers.0", "gpt_neox.layers.1"]
    sequential = model("GPTNeoXForCausalLM", layers, use_parallel_residual=False)
    parallel = model("GPTNeoXForCausalLM", layers, use_parallel_residual=True)
    assert sequential.layers == parallel.layers == 2
    place = Place("gpt_neox.layers.1.post_attention_layernorm", "input")
    assert sequential.stream("resid_mid", 1) == Stream(place)
    with pytest.raises(LocationError, match=r"parallel blocks.*resid_pre \+ attn_out \+ mlp_out = resid_post"):
        parallel.stream("resid_mid", 1)


def test_a_multiplier_of_the_config_is_part_of_what_is_added() -> None:
    anatomy = model("GraniteForCausalLM", ["model.layers.0"], residual_multiplier=0.5)
    assert anatomy.stream("mlp_out", 0) == Stream(Place("model.layers.0.mlp", "output"), 1, 0.5)
    assert anatomy.stream("resid_post", 0).multiplier == 1


def test_a_dense_layer_has_no_router() -> None:
    anatomy = model("MixtralForCausalLM", ["model.layers.0.mlp", "model.layers.1.block_sparse_moe.gate"])
    assert anatomy.stream("router_logits", 1).place.path == "model.layers.1.block_sparse_moe.gate"
    with pytest.raises(LocationError, match=r"`model.layers.0` has no experts"):
        anatomy.stream("router_logits", 0)
    with pytest.raises(LocationError, match="not computed by LlamaForCausalLM: it has no experts"):
        model("LlamaForCausalLM", ["model.layers.0"]).stream("router_logits", 0)


def test_positions_are_not_part_of_the_stream() -> None:
    hidden, residual = torch.ones(3, 2), torch.full((3, 2), 2.0)
    call = ((torch.arange(3), hidden), {"residual": residual, "other": hidden})
    assert [id(part) for part in Stream(Place("layer", "input"), 2).parts(call)] == [id(hidden), id(residual)]


def test_a_written_row_goes_whole_into_the_first_part() -> None:
    parts = [torch.full((3, 2), 0.1).bfloat16(), torch.full((3, 2), 1000.0).bfloat16()]
    before = [part.clone() for part in parts]
    stream = Derived(parts, "model.resid_post[0]")
    stream.value[1] = torch.tensor([31234.0, -0.3])
    written = stream.value.clone()
    stream.settle()
    assert (parts[0] + parts[1])[1].equal(written[1])
    assert parts[1][1].tolist() == [0, 0]
    for part, old in zip(parts, before, strict=True):
        assert part[0].equal(old[0])
        assert part[2].equal(old[2])


def test_a_bias_that_the_model_adds_is_taken_off_what_is_written() -> None:
    output, bias = torch.zeros(3, 2), torch.tensor([1.0, -2.0])
    stream = Derived([output, bias], "model.attn_out[0]")
    assert stream.value[0].tolist() == [1, -2]
    stream.replace(torch.full((3, 2), 5.0))
    stream.settle()
    assert (output + bias).equal(torch.full((3, 2), 5.0))
    assert bias.tolist() == [1, -2]


def test_a_multiplied_stream_is_written_divided() -> None:
    output = torch.ones(2, 2)
    stream = Derived([output], "model.mlp_out[0]", 0.25)
    assert stream.value[0].tolist() == [0.25, 0.25]
    stream.value[0] = 1.0
    stream.settle()
    assert output.tolist() == [[4, 4], [1, 1]]


def test_a_stream_is_stale_once_its_parts_were_edited_by_their_own_names() -> None:
    parts = [torch.ones(2, 2), torch.ones(2, 2)]
    stream = Derived(parts, "model.resid_post[0]")
    assert not stream.stale
    parts[1].add_(1)
    assert stream.stale


@pytest.mark.parametrize("value", [torch.ones(3, 2), torch.ones(2, 2, dtype=torch.int64), 0.5])
def test_another_shape_or_kind_is_refused(value: Any) -> None:
    stream = Derived([torch.ones(2, 2)], "model.resid_post[0]")
    with pytest.raises(WriteError, match=r"model.resid_post\[0\] takes shape \(2, 2\) torch.float32; got"):
        stream.replace(value)
