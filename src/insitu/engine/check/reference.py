"""What transformers computes for the same tokens, in a process of its own.

Run as ``python -m insitu.engine.check.reference``: a request in JSON on standard input, the values in the
safetensors file that it names. A process of its own, because vLLM changes classes of transformers in
its own, and because the memory that the second model takes is then given back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Values = dict[str, torch.Tensor]


class NoReferenceError(Exception):
    """Transformers can't run this model here."""


@dataclass(frozen=True)
class Request:
    """What to compute. ``streams``: [name, layer, path, multiplier] in vLLM's model, whose paths are mostly
    those of transformers; ``modules``: paths whose output is wanted; both for each sequence of ids."""

    repo: str
    revision: str | None
    trust_remote_code: bool
    dtypes: Sequence[str]
    sequences: Sequence[Sequence[int]]
    streams: Sequence[tuple[str, int | None, str, float]]
    modules: Sequence[str]
    file: str = ""


def key(dtype: str, sequence: int, name: str, layer: int | None = None) -> str:
    return f"{dtype}/{sequence}/{name}" if layer is None else f"{dtype}/{sequence}/{name}/{layer}"


def compute(request: Request) -> tuple[Values, str]:
    """The values by ``key``, those of transformers that it has, and its version.

    Raises ``NoReferenceError`` with the reason if it can't run the model.
    """
    package = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "values.safetensors")
        done = subprocess.run(
            [sys.executable, "-m", "insitu.engine.check.reference"],
            input=json.dumps({**asdict(request), "file": file}),
            capture_output=True,
            text=True,
            env=environment,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
            raise NoReferenceError(lines[-1])
        return load_file(file), done.stdout.strip().splitlines()[-1]


# -- in the other process -------------------------------------------------------------------------


@dataclass
class _Seen:
    """Inputs (first arguments) and outputs (first tensors) of modules in one forward, in order of return."""

    inputs: Values = field(default_factory=dict)
    outputs: Values = field(default_factory=dict)


def main() -> None:
    try:
        _answer()
    except Exception as error:
        # The other side shows the last line.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _answer() -> None:
    _use_all_cores()
    import transformers

    transformers.logging.set_verbosity_error()
    request = Request(**json.load(sys.stdin))
    values: Values = {}
    for dtype in request.dtypes:
        try:
            values |= _in_dtype(transformers, request, dtype)
        except Exception:
            if dtype == request.dtypes[0]:
                raise  # the first is needed, the others say how exact it is
    save_file(values, request.file)
    print(transformers.__version__)


def _in_dtype(transformers: Any, request: Request, dtype: str) -> Values:
    model = _load(transformers, request, dtype)
    return {
        key(dtype, number, name, layer): value.clone(memory_format=torch.contiguous_format)
        for number, ids in enumerate(request.sequences)
        for (name, layer), value in _computed(model, ids, request).items()
    }


def _use_all_cores() -> None:
    # vLLM ties the threads of its process to cores, and this process has inherited that.
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except (AttributeError, OSError):
        return


def _load(transformers: Any, request: Request, dtype: str) -> torch.nn.Module:
    kwargs = {"revision": request.revision, "trust_remote_code": request.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(request.repo, **kwargs)
    # Written out, attention has caps and sinks; with ALiBi only the fused one is right.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(
        request.repo, dtype=getattr(torch, dtype), attn_implementation=attention, **kwargs
    ).eval()


@torch.no_grad()
def _computed(model: Any, ids: Sequence[int], request: Request) -> dict[tuple[str, int | None], torch.Tensor]:
    seen, parts = _Seen(), _parts(model, [path for _, _, path, _ in request.streams])
    hooks = [module.register_forward_hook(_hook(seen, path), with_kwargs=True) for path, module in parts.items()]
    try:
        tokens = torch.tensor([list(ids)])
        output = model(tokens, use_cache=False, output_attentions=model.config._attn_implementation == "eager")
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[tuple[str, int | None], torch.Tensor] = {("logits", None): output.logits[0]}
    for layer, weights in enumerate(getattr(output, "attentions", None) or ()):
        if weights is not None:
            found["attn_pattern", layer] = weights[0].transpose(0, 1)
    weight = model.get_input_embeddings().weight
    for name, layer, path, _ in request.streams:
        if name == "embed":
            # Without the scale that some of transformers' embeddings have in them.
            found[name, None] = seen.outputs[path] = torch.nn.functional.embedding(tokens[0], weight)
        elif layer is None and path in seen.outputs:
            found[name, None] = seen.outputs[path]
        elif name == "resid_pre" and path in seen.outputs:
            found |= _layer_streams(seen, path, layer, _sublayers(request, layer))
        elif name == "router_logits" and (logits := _router(parts, seen, path)) is not None:
            found[name, layer] = logits
    for path in request.modules:
        if path in seen.outputs:
            found[f"module:{path}", None] = seen.outputs[path]
    return found


def _parts(model: Any, wanted: Sequence[str]) -> dict[str, Any]:
    """Modules by the paths that they have in vLLM's model. Where it runs transformers' own code, it calls every
    trunk ``model``."""
    own = f"{model.base_model_prefix}."
    moved = not hasattr(model, "model") and not any(path.startswith(own) for path in wanted)
    return {
        f"model.{path.removeprefix(own)}" if moved and path.startswith(own) else path: module
        for path, module in model.named_modules()
        if path
    }


def _hook(seen: _Seen, path: str) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = _first((*args, *kwargs.values()))
        returned = _first(output if isinstance(output, (tuple, list)) else (output,))
        if given is not None:
            seen.inputs[path] = given
        if returned is not None:
            seen.outputs[path] = returned

    return hook


def _first(values: Sequence[Any]) -> torch.Tensor | None:
    """The first floating tensor, without its batch axis."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return (value[0] if value.dim() > 2 and value.shape[0] == 1 else value).clone()
    return None


def _sublayers(request: Request, layer: int | None) -> dict[str, tuple[str, float]]:
    """Where vLLM's model has what this layer adds to the stream, and what it is multiplied by."""
    wanted = ("attn_out", "mlp_out")
    return {name: (path, times) for name, i, path, times in request.streams if i == layer and name in wanted}


def _layer_streams(
    seen: _Seen, at: str, layer: int | None, added: Mapping[str, tuple[str, float]]
) -> dict[tuple[str, int | None], torch.Tensor]:
    """A layer's streams: its input, its output, and the two outputs inside it that make the one of the other."""
    before, after = seen.inputs[at], seen.outputs[at]
    found: dict[tuple[str, int | None], torch.Tensor] = {("resid_pre", layer): before, ("resid_post", layer): after}
    if len(added) < 2:
        return found
    bound = 1e-4 if after.dtype.itemsize > 2 else 0.02
    size = after.abs().max()
    (_, times), _ = added.values()
    candidates = {name: _candidates(seen, at, path, before) for name, (path, _) in added.items()}
    for attention in candidates["attn_out"]:
        for mlp in candidates["mlp_out"]:
            attn_out, mlp_out = seen.outputs[attention] * times, seen.outputs[mlp] * times
            if attention != mlp and (before + attn_out + mlp_out - after).abs().max() <= bound * size:
                found["attn_out", layer], found["mlp_out", layer] = attn_out, mlp_out
                found["resid_mid", layer] = before + attn_out
                for (path, _), its in zip(added.values(), (attention, mlp), strict=True):
                    if path != its:
                        seen.outputs.pop(path, None)  # by the same name, another value
                return found
    return found


def _candidates(seen: _Seen, at: str, path: str, like: torch.Tensor) -> list[str]:
    """Modules that transformers may call what vLLM's model has at ``path``: that one and the modules inside it,
    outer ones first, or if there is none of that name, all of the layer."""
    inside = [each for each in seen.outputs if each == path or each.startswith(f"{path}.")]
    there = inside or [each for each in seen.outputs if each.startswith(f"{at}.")]
    fitting = [each for each in there if seen.outputs[each].shape == like.shape]
    return sorted(fitting, key=lambda each: each.count("."))


def _router(parts: Mapping[str, Any], seen: _Seen, path: str) -> torch.Tensor | None:
    """The logits of a router. Those of transformers return many things, and all multiply by their weight."""
    at, _, name = path.rpartition(".")
    parent = at.rpartition(".")[0]
    for other in (path, f"{parent}.mlp.{name}", f"{parent}.{name}", f"{at}.router"):
        weight = getattr(parts.get(other), "weight", None)
        if other in seen.inputs and weight is not None and weight.shape[-1] == seen.inputs[other].shape[-1]:
            return torch.nn.functional.linear(seen.inputs[other], weight)
    return None


if __name__ == "__main__":
    main()
