"""What a name that is no module may have been meant to be, by someone who comes from elsewhere."""

from __future__ import annotations

from insitu.tree.streams import LAYER_STREAMS, MODEL_STREAMS


def meant(parent: str, name: str) -> str:
    """The end of an error about ``name``, which ``parent`` does not have as a module; empty if nothing is known."""
    stream, is_standard = name.partition("[")[0], "a name of the whole model, read and written in a block"
    if stream in LAYER_STREAMS:
        return f"; `{stream}` is {is_standard}: `model.{stream}[i]`"
    if stream in MODEL_STREAMS:
        return f"; `{stream}` is {is_standard}: `model.{stream}`"
    if name in ("weight", "bias"):
        return "; parameters are no places: vLLM's own `LLM.apply_model` hands the modules that have them to a function"
    if not parent:
        return "; `model.resid_post[i]`, `model.attn_out[i]` and others are called so on every architecture"
    return ""
