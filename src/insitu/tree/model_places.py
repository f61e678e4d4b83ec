"""The places of a whole model, by names that mean the same on every architecture, after TransformerLens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from insitu.tree.place import LOGITS, SAMPLES
from insitu.tree.session import session_for
from insitu.tree.streams import LayerStream


class ModelPlaces:
    """What a model has besides its modules. Each is read, written and called in a block."""

    _owner: object
    """Stands for the model in the sessions of its blocks."""

    @abstractmethod
    def _count_layers(self) -> int: ...

    @property
    def logits(self) -> Any:
        """This step's logits before sampling, ``[1, vocab]``; writable."""
        return session_for("`model.logits`", self._owner).read(LOGITS)

    @logits.setter
    def logits(self, value: Any) -> None:
        session_for("`model.logits`", self._owner).write(LOGITS, value)

    @property
    def samples(self) -> Any:
        """The ids drawn in this step, ``[1]``; what is written is what generation goes on from."""
        return session_for("`model.samples`", self._owner).read(SAMPLES)

    @samples.setter
    def samples(self, value: Any) -> None:
        session_for("`model.samples`", self._owner).write(SAMPLES, value)

    @property
    def embed(self) -> Any:
        """The token embedding alone, ``[tokens, d_model]`` in the model's dtype, as the embedding module
        returns it; writable. Where the model scales or norms it, or adds positions, ``resid_pre[0]`` is
        what comes of that.
        """
        return session_for("`model.embed`", self._owner).read_stream("embed", None)

    @embed.setter
    def embed(self, value: Any) -> None:
        session_for("`model.embed`", self._owner).write_stream("embed", None, value)

    @property
    def pos_embed(self) -> Any:
        """The embedding of positions that is added to the tokens', ``[tokens, d_model]``; writable.

        Raises ``LocationError`` where positions enter through attention (rotary, ALiBi).
        """
        return session_for("`model.pos_embed`", self._owner).read_stream("pos_embed", None)

    @pos_embed.setter
    def pos_embed(self, value: Any) -> None:
        session_for("`model.pos_embed`", self._owner).write_stream("pos_embed", None, value)

    @property
    def final_norm(self) -> Any:
        """The normed stream that the unembedding gets, ``[tokens, d_model]``; writable."""
        return session_for("`model.final_norm`", self._owner).read_stream("final_norm", None)

    @final_norm.setter
    def final_norm(self, value: Any) -> None:
        session_for("`model.final_norm`", self._owner).write_stream("final_norm", None, value)

    @property
    def resid_pre(self) -> LayerStream:
        """The residual stream before each layer, ``[tokens, d_model]``; ``resid_pre[0]`` is what enters layer 0."""
        return self._stream("resid_pre")

    @property
    def resid_mid(self) -> LayerStream:
        """The residual stream between each layer's attention and MLP: ``resid_pre + attn_out``.

        Raises ``LocationError`` where the model computes no such value (parallel blocks).
        """
        return self._stream("resid_mid")

    @property
    def resid_post(self) -> LayerStream:
        """The residual stream after each layer: ``resid_mid + mlp_out``, in parallel blocks
        ``resid_pre + attn_out + mlp_out``. The last one is what the final norm is given."""
        return self._stream("resid_post")

    @property
    def attn_out(self) -> LayerStream:
        """What each layer's attention adds to the stream, after any norm or multiplier of its output."""
        return self._stream("attn_out")

    @property
    def mlp_out(self) -> LayerStream:
        """What each layer's MLP or experts add to the stream, after any norm or multiplier of their output."""
        return self._stream("mlp_out")

    @property
    def router_logits(self) -> LayerStream:
        """The scores by which each layer of experts chooses, ``[tokens, experts]``, before the softmax.

        Raises ``LocationError`` for a dense layer.
        """
        return self._stream("router_logits")

    @property
    def q(self) -> LayerStream:
        """The queries that each layer's attention is given, ``[tokens, heads, head_size]``: after rotary positions
        and norms by head, before the kernel's scale. Writable.

        Raises ``LocationError`` where attention has no keys by head.
        """
        return self._stream("q")

    @property
    def k(self) -> LayerStream:
        """The keys that each layer's attention is given, ``[tokens, kv_heads, head_size]``: after rotary positions
        and norms by head. Writable; later tokens attend to what was written. Query head ``h`` uses key head
        ``h // (heads // kv_heads)``.
        """
        return self._stream("k")

    @property
    def v(self) -> LayerStream:
        """The values that each layer's attention is given, ``[tokens, kv_heads, head_size]``; writable as ``k``."""
        return self._stream("v")

    @property
    def attn_pattern(self) -> LayerStream:
        """How much each query takes of each key, ``[heads, query tokens, key tokens]`` in float32; also
        ``model.attn_pattern(i)``.

        Computed from the layer's ``q`` and ``k`` as they are then, edits included, with what the engine's kernel
        does: scale, causal mask, window, soft cap, ALiBi, sinks, rounding of the KV cache. Rows sum to 1, with
        sinks to less. In a decode step it has one query, and keys of all tokens so far: a block that says
        ``attn_pattern`` and how it gets to later steps has the keys of all layers recorded from its first step.

        Not a tensor of the model, so it can't be written: ``WriteError``. Raises ``LocationError`` for attention
        of a kind that is not known.
        """
        return self._stream("attn_pattern")

    def _stream(self, name: str) -> LayerStream:
        made = vars(self).setdefault("_layer_streams", {})
        if name not in made:
            made[name] = LayerStream(name, self._count_layers, self._owner)
        return made[name]

    def apply_final_norm(self, hidden: Any) -> Any:
        """The model's own last norm of ``[rows, d_model]``, in a block; ``unembed`` takes what it returns."""
        return session_for("`model.apply_final_norm`", self._owner).apply_norm(hidden)

    def unembed(self, hidden: Any) -> Any:
        """The model's own unembedding of ``[rows, d_model]`` of the normed stream, in a block.

        Returns ``[rows, vocab]``, caps and scales included.
        """
        return session_for("`model.unembed`", self._owner).unembed(hidden)
