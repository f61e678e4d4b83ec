"""The real modules behind the paths of a model, and its outline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from insitu.tree import Module, Outline, join


class ModuleTable:
    """Every module of ``root`` by path. One module may stand under several paths.

    Such a shared module (one rotary embedding for all layers, an activation that a registry hands
    to everybody) is told apart by its owner: the nearest module above it that has one path only.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.by_path: dict[str, torch.nn.Module] = dict(root.named_modules(remove_duplicate=False))
        self._beside = _beside_the_tree(root, self.by_path)
        self.by_path |= self._beside
        self._vocabularies: dict[str, int | None] = {}
        self._paths: dict[int, list[str]] = {}
        for path, module in self.by_path.items():
            self._paths.setdefault(id(module), []).append(path)

    @cached_property
    def fixed(self) -> frozenset[int]:
        """The memory of parameters and buffers."""
        tensors = (*self.root.parameters(), *self.root.buffers())
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def has_state(self, path: str) -> bool:
        """Whether calling the module leaves something behind, as attention does in its KV cache."""
        inside = any(each.startswith(join(path, "")) for each in self._beside)
        return inside or any(hasattr(part, "kv_cache") for part in self.by_path[path].modules())

    @cached_property
    def parameters(self) -> int:
        """How many there are."""
        return sum(parameter.numel() for parameter in self.root.parameters())

    def vocabulary(self, path: str) -> int | None:
        """How many ids the module there embeds, if it embeds any."""
        if path not in self._vocabularies:
            module: Any = self.by_path.get(path)
            module = getattr(module, "base_layer", module)  # with adapters
            found = getattr(module, "org_vocab_size", None) or getattr(module, "num_embeddings", None)
            self._vocabularies[path] = found
        return self._vocabularies[path]

    def __getitem__(self, path: str) -> torch.nn.Module:
        return self.by_path[path]

    def paths_of(self, module: torch.nn.Module) -> list[str]:
        return self._paths[id(module)]

    def is_shared(self, path: str) -> bool:
        return len(self._paths[id(self.by_path[path])]) > 1

    def owner(self, path: str) -> str:
        """The nearest module above ``path`` that has one path only."""
        while path and self.is_shared(path):
            path = path.rpartition(".")[0]
        return path

    def owners(self, path: str) -> list[str]:
        """The owners of the module at ``path`` under each of its paths."""
        return [self.owner(each) for each in self._paths[id(self.by_path[path])]]

    def path_now(self, module: torch.nn.Module, active: Sequence[str]) -> str | None:
        """The path under which ``module`` is being called, given the calls in progress, outermost first.

        The innermost owner in progress decides: in a model whose unembedding is its embedding, the root
        owns one path of it and the trunk the other. None if no owner is in progress, or one has several.
        """
        paths = self._paths[id(module)]
        if len(paths) == 1:
            return paths[0]
        for call in reversed(active):
            found = [path for path in paths if self.owner(path) == call]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def outline(self) -> Outline:
        return self._outline

    @cached_property
    def _outline(self) -> Outline:
        return Outline({path: self._described(path, module) for path, module in self.by_path.items()})

    def _described(self, path: str, module: torch.nn.Module) -> Module:
        children = [name for name, child in module._modules.items() if child is not None]
        children += [each.rpartition(".")[2] for each in self._beside if each.rpartition(".")[0] == path]
        return Module(type(module).__name__, tuple(children), _note(module))


def _beside_the_tree(root: Any, by_path: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Where vLLM runs transformers' own code, each layer's attention of vLLM's is not in the tree of modules: the
    module that knows the layer's number calls it, and is taken for its parent."""
    beside: dict[str, torch.nn.Module] = {}
    for number, module in getattr(root, "attention_instances", {}).items():
        callers = [path for path, each in by_path.items() if getattr(each, "layer_idx", None) == number]
        inner = [path for path in callers if not any(other.startswith(f"{path}.") for other in callers)]
        if len(inner) == 1 and f"{inner[0]}.attn" not in by_path:
            beside[f"{inner[0]}.attn"] = module
    return beside


def _note(module: torch.nn.Module) -> str:
    # vLLM's linear layers may pack their weights away, but always say what they map.
    sizes = [getattr(module, name, None) for name in ("input_size", "output_size")]
    if all(isinstance(size, int) for size in sizes):
        return f"{sizes[0]} -> {sizes[1]}"
    shapes = [(name, list(parameter.shape)) for name, parameter in module.named_parameters(recurse=False)]
    return ", ".join(f"{name} {shape}" for name, shape in shapes if shape != [0])
