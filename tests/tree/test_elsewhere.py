"""Names that people bring from elsewhere are answered with what they are here."""

from __future__ import annotations

import pytest

from insitu.block import UnknownModuleError
from insitu.tree.elsewhere import meant
from tests.tree.test_node import OUTLINE


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("resid_post[3]", r"`resid_post` is a name of the whole model.*: `model.resid_post\[i\]`$"),
        ("model.mlp_out", r"`mlp_out` is a name of the whole model.*: `model.mlp_out\[i\]`$"),
        ("model.final_norm", r"`final_norm` is a name of the whole model.*: `model.final_norm`$"),
        ("lm_head.weight", r"no submodules; parameters are no places: .*`LLM.apply_model`"),
        ("transformer", r"has model, lm_head; `model.resid_post\[i\]`.* on every architecture$"),
    ],
)
def test_the_error_says_what_was_meant(path: str, says: str) -> None:
    with pytest.raises(UnknownModuleError, match=says):
        OUTLINE.require(path)


def test_of_what_is_not_known_nothing_is_said() -> None:
    assert meant("model.layers.0", "mpl") == ""
