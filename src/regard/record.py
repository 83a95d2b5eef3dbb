"""Looking from outside: every attention map of a model, by module path, while nothing in the model knows of it.

The model runs as always; a hook on each attention recomputes its map from that layer's own query and keys.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention


class Maps(dict[str, Tensor]):
    """Module path -> (batch, heads, query, key), never averaged. Maps of one module that were made one after another
    (a recurrent decoder's) stand one below the other, as more queries."""

    def add(self, name: str, weights: Tensor) -> None:
        self[name] = torch.cat([self[name], weights], dim=-2) if name in self else weights


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[Maps]:
    """Record every map that the model makes inside the block."""
    maps = Maps()

    def hook(name: str) -> Any:
        def keep(module: Attention, inputs: tuple[Any, ...], output: Tensor) -> None:
            maps.add(name, module.weights(*inputs).detach())

        return keep

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
