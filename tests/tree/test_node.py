"""Nodes: paths that are checked against the outline when there is one."""

from __future__ import annotations

import pytest

from insitu.block import OutsideTraceError, UnknownModuleError
from insitu.tree import Module, Node, Outline, path_of

OUTLINE = Outline(
    {
        "": Module("Model", ("model", "lm_head")),
        "model": Module("Trunk", ("layers", "norm")),
        "model.layers": Module("ModuleList", ("0", "1", "2")),
        **{f"model.layers.{i}": Module("Layer", ("mlp",), "weight [4, 4]") for i in range(3)},
        **{f"model.layers.{i}.mlp": Module("Linear", (), "4 -> 8") for i in range(3)},
        "model.norm": Module("Norm"),
        "lm_head": Module("Linear"),
    }
)


@pytest.fixture
def root() -> Node:
    return Node("", lambda: OUTLINE)


def test_attributes_indices_and_slices_are_paths(root: Node) -> None:
    assert path_of(root.model.layers[1].mlp) == "model.layers.1.mlp"
    assert path_of(root.model.layers[-1]) == "model.layers.2"
    assert [path_of(node) for node in root.model.layers[1:]] == ["model.layers.1", "model.layers.2"]
    assert [path_of(node) for node in root.model.layers] == [f"model.layers.{i}" for i in range(3)]
    assert path_of(root.get("model.norm")) == "model.norm"
    assert len(root.model.layers) == 3
    assert root.model.layers[1] == root.model.layers[-2]


def test_without_an_outline_any_path_can_be_named(root: Node) -> None:
    lazy = Node("", lambda: None)
    assert path_of(lazy.anything[3].at_all) == "anything.3.at_all"
    with pytest.raises(OutsideTraceError, match=r"model\.dispatch\(\)"):
        len(lazy.layers)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("model.layer", "model.layers"),
        ("model.layers.7", "model.layers."),
        ("modle", "model"),
        ("model.nrom", "model.norm"),
    ],
)
def test_an_unknown_module_names_the_nearest(root: Node, path: str, nearest: str) -> None:
    with pytest.raises(UnknownModuleError, match=rf"no module `{path}`; the nearest is `{nearest}"):
        root.get(path)


def test_places_are_read_only_in_a_block(root: Node) -> None:
    with pytest.raises(OutsideTraceError, match=r"`model\.norm\.output` exists only while the model runs"):
        root.model.norm.output
    with pytest.raises(OutsideTraceError, match=r"calling `lm_head`"):
        root.lm_head(1)


def test_a_module_can_t_be_assigned(root: Node) -> None:
    with pytest.raises(AttributeError, match=r"`model\.norm` can't be assigned.*`model\.norm\.output = value`"):
        root.model.norm = 3


def test_an_index_out_of_range(root: Node) -> None:
    with pytest.raises(IndexError, match="has 3 modules"):
        root.model.layers[-4]


def test_printing_folds_equal_neighbours(root: Node) -> None:
    assert repr(root.model) == (
        "(model): Trunk\n"
        "  (layers): ModuleList\n"
        "    (0-2): Layer  weight [4, 4]\n"
        "      (mlp): Linear  4 -> 8\n"
        "  (norm): Norm"
    )
    assert {"model", "lm_head", "output"} <= set(dir(root))
    assert "0" not in dir(root.model.layers)
