"""Patterns mean the modules that they say, and no others."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from insitu.block import ArgumentError, UnknownModuleError
from insitu.tree import Module, Node, Outline, matching


def _outline() -> Outline:
    modules: dict[str, Module] = {
        "": Module("LM", ("model", "lm_head")),
        "model": Module("Trunk", ("embed", "layers")),
        "model.embed": Module("Embedding"),
        "model.layers": Module("ModuleList", ("0", "1", "10")),
    }
    for layer in ("0", "1", "10"):
        at = f"model.layers.{layer}"
        modules |= {
            at: Module("Layer", ("mlp",)),
            f"{at}.mlp": Module("MLP", ("up_proj", "down_proj")),
            f"{at}.mlp.up_proj": Module("Linear"),
            f"{at}.mlp.down_proj": Module("Linear"),
        }
    return Outline({**modules, "lm_head": Module("Linear")})


OUTLINE = _outline()
NODES = Node("", lambda: OUTLINE)
MLPS = ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.10.mlp"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.1", ["model.layers.1"]),
        ("model.layers.*", ["model.layers.0", "model.layers.1", "model.layers.10"]),
        ("model.layers.*.mlp", MLPS),
        ("**.mlp", MLPS),
        ("model.**.mlp", MLPS),
        ("model.layers.1*.mlp", [MLPS[1], MLPS[2]]),
        ("model.layers.0.**", ["model.layers.0", *(f"{MLPS[0]}{end}" for end in ("", ".up_proj", ".down_proj"))]),
        ("**.1.**.*_proj", [f"{MLPS[1]}.up_proj", f"{MLPS[1]}.down_proj"]),
        ("*", ["model", "lm_head"]),
        ("**.embed", ["model.embed"]),
        ("model.**.embed", ["model.embed"]),
        (["lm_head", "**.0.mlp"], [MLPS[0], "lm_head"]),
        (("**.mlp", "model.layers.0.mlp"), MLPS),
    ],
)
def test_means(given: Any, wanted: list[str]) -> None:
    assert matching(given, OUTLINE) == wanted


def test_all_are_every_module_but_the_whole() -> None:
    assert matching(None, OUTLINE) == list(OUTLINE.modules)[1:]
    assert matching("**", OUTLINE) == list(OUTLINE.modules)[1:]


def test_nodes_and_slices_of_them() -> None:
    layers = NODES.model.layers
    assert matching(layers[2 - 1], OUTLINE) == ["model.layers.1"]
    assert matching([layers[:2], NODES.lm_head, "**.embed"], OUTLINE) == [
        "model.embed",
        "model.layers.0",
        "model.layers.1",
        "lm_head",
    ]


def test_a_dot_is_a_dot() -> None:
    with pytest.raises(UnknownModuleError):
        matching("modelXlayers.*", OUTLINE)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("model.layer.*.mlp", "model.layers.*.mlp"),
        ("**.mpl", "**.mlp"),
        ("model.layers.*.mlp.up_prj*", "model.layers.*.mlp.up_proj"),
        ("model.layers.0.mpl", "model.layers.0.mlp"),
        ("lm_haed", "lm_head"),
    ],
)
def test_what_means_nothing_names_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(UnknownModuleError, match=f"`{re.escape(given)}`.*nearest is `{re.escape(nearest)}`"):
        matching(["lm_head", given], OUTLINE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty list"),
        (3, "got int 3"),
        ({"lm_head": True}, "got dict"),
        ([True], "got bool True"),
        ("model.layers", "`model.layers` is a list.*`model.layers.*`"),
        ("", "the whole model"),
    ],
)
def test_what_is_no_name_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        matching(given, OUTLINE)


@pytest.mark.parametrize("pattern", ["*" * 40 + "x", ".".join(["**"] * 40) + ".x", "**." * 20 + "*o*o*o*o*o*o*o*o*o*x"])
def test_no_pattern_takes_long(pattern: str) -> None:
    long = Outline({"": Module("A", ("o" * 200,)), "o" * 200: Module("B", ("b",)), "o" * 200 + ".b": Module("C")})
    start = time.monotonic()
    with pytest.raises(UnknownModuleError):
        matching(pattern, long)
    assert time.monotonic() - start < 2
