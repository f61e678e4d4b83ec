"""Whether what a block sees of a model is right: compared with transformers, with itself, and in company."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch

from insitu.engine.check.comparisons import (
    LOGITS,
    UNEMBEDDED,
    Bounds,
    Reading,
    finite_and_not_zero,
    in_company,
    rounding,
    with_parts,
    with_transformers,
)
from insitu.engine.check.reference import NoReferenceError, Request, Values, compute
from insitu.engine.check.report import CheckReport, Row
from insitu.run.standard_names import Name, Names
from insitu.tree import Outline, session_for

PROMPTS = (
    "The Eiffel Tower is in the city of",
    "Water boils at",
    "When Mary and John went to the store, John gave a drink to",
)
NOTHING_FORCED: Mapping[tuple[int, ...], Sequence[int]] = {}
STEPS = 3


def check(
    model: Any, engine: Any, run: Callable[..., Any], prompts: Sequence[Any] | None = None, reference: bool = True
) -> CheckReport:
    """The report on a running model; see ``VLLM.check``. ``run`` is as ``VLLM.run``."""
    config = engine.config.model_config
    prompts = PROMPTS if prompts is None else prompts
    reader = _Reader(model, engine, run)
    alone = [reader.read([prompt])[0] for prompt in prompts]
    company = reader.read([*prompts, *prompts], {tuple(one.prompt): one.drawn for one in alone})[: len(alone)]
    compared: list[Row] = []
    missing: list[str] = []
    said, bounds = "nothing, as asked", Bounds(8 * rounding(config.dtype), sides=2)
    if reference:
        try:
            values, said, exact, own = _computed_by_transformers(config, reader, alone)
            compared, noise, missing = with_transformers(alone, values, exact, own)
            bounds = Bounds(rounding(config.dtype), noise, sides=2)
        except NoReferenceError as error:
            said = f"nothing, as transformers can't run this model here: {error}"
    rows = [
        *compared,
        *with_parts(reader.names, alone, config.dtype),
        *in_company(alone, company, bounds),
        *finite_and_not_zero(alone),
    ]
    dtype = str(config.dtype).removeprefix("torch.")
    return CheckReport(config.model, dtype, said, tuple(rows), tuple(missing))


def _computed_by_transformers(
    config: Any, reader: _Reader, readings: Sequence[Reading]
) -> tuple[Values, str, str, str]:
    """The values, what they are, the dtype to be taken for exact, and the engine's own, which is the same if
    transformers does not run in a finer one."""
    own = str(config.dtype).removeprefix("torch.")
    finer = "float64" if own == "float32" else "float32"
    _require_memory(reader.names.parameters * (8 if finer == "float64" else 4))
    streams = [
        (name, layer, stream.place.path, stream.multiplier) for (name, layer), stream in reader.names.computed.items()
    ]
    sequences = [reading.ids for reading in readings]
    request = Request(
        config.model, config.revision, config.trust_remote_code, [own, finer], sequences, streams, reader.modules
    )
    values, version = compute(request)
    exact = finer if any(name.startswith(f"{finer}/") for name in values) else own
    return values, f"transformers {version} in {exact}", exact, own


def _require_memory(needed: int) -> None:
    free = psutil.virtual_memory().available
    if needed * 1.2 > free:
        raise NoReferenceError(f"it needs about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free")


class _Reader:
    """Reads every standard name, and a sample of modules, beside given prompts."""

    def __init__(self, model: Any, engine: Any, run: Callable[..., Any]) -> None:
        self._model = model
        self._run = run
        # One step watched as a whole tells the order in which the names can be read.
        run(lambda tracer: tracer.cache(inputs=True) and None, PROMPTS[0], max_tokens=1)
        self.names = engine.names()
        self.modules = _sample(engine.outline, self.names)

    def read(
        self, prompts: Sequence[Any], forced: Mapping[tuple[int, ...], Sequence[int]] = NOTHING_FORCED
    ) -> list[Reading]:
        """All prompts together. ``forced``: by prompt, the ids that generation is to go on with."""
        # Names of its own: the block takes along to the worker what it names.
        model, names, modules = self._model, list(self.names.computed), self.modules

        def block(tracer: Any) -> tuple[dict[Name, list[torch.Tensor]], Any, Any]:
            prompt = tuple(session_for("the check").prompt or ())
            cache = tracer.cache(modules) if modules else {}
            found: dict[Name, list[torch.Tensor]] = {}
            for step in tracer.iter[:]:
                for name, layer in names:
                    # Named in this text, so that the keys of earlier steps are recorded.
                    stream: Any = model.attn_pattern if name == "attn_pattern" else getattr(model, name)
                    value = stream if layer is None else stream[layer]
                    found.setdefault((name, layer), []).append(value.clone())
                if ("final_norm", None) in names:
                    by_hand = model.unembed(found["final_norm", None][-1][-1:])
                    found.setdefault(UNEMBEDDED, []).append(by_hand)
                found.setdefault(LOGITS, []).append(model.logits.clone())
                if prompt in forced:
                    model.samples[0] = forced[prompt][step]
            return found, cache, tracer.result

        settings = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True}
        return [_reading(*values) for values in self._run(block, list(prompts), **settings)]


def _reading(found: dict[Name, list[torch.Tensor]], cache: Any, result: Any) -> Reading:
    drawn = list(result.outputs[0].token_ids)
    names = {at: _by_tokens(values) if at[0] == "attn_pattern" else torch.cat(values) for at, values in found.items()}
    modules = {path: torch.cat([_first(value) for value in cached.output]) for path, cached in cache.items()}
    return Reading(list(result.prompt_token_ids), drawn, names, modules)


def _by_tokens(patterns: Sequence[torch.Tensor]) -> torch.Tensor:
    """The patterns of all steps, ``[tokens, heads, keys]``."""
    keys = patterns[-1].shape[-1]
    padded = [torch.nn.functional.pad(each, (0, keys - each.shape[-1])) for each in patterns]
    return torch.cat(padded, 1).transpose(0, 1)


def _first(value: Any) -> torch.Tensor:
    return _first(value[0]) if isinstance(value, (tuple, list)) else value


def _sample(outline: Outline, names: Names) -> list[str]:
    """The embedding, the norms of the stream, attention, and what is added to the stream, by the modules' own names."""
    places = {name: stream.place.path for name, stream in names.computed.items()}
    sampled = ("embed", "final_norm", "attn_pattern", "attn_out", "mlp_out")
    chosen = [path for (name, _), path in places.items() if name in sampled]
    for (name, _), layer in places.items():
        if name == "resid_post":
            children = outline.children(layer)
            chosen += [f"{layer}.{child}" for child in children if "Norm" in outline.modules[f"{layer}.{child}"].kind]
    return list(dict.fromkeys(chosen))
