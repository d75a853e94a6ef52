"""Slimming a traced graph: what nobody reads again is not kept with it.

*Takes* a traced graph. *Gives* it with two notes on each node: `val`, one fake tensor for all values of one layout, and
`recorded`. The text and the code that PyTorch made for it are dropped: nobody runs a joint graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from koila.ir.tree import map_leaves


def slim(graph: fx.Graph) -> None:
    """Drop what nobody reads; to be called once nobody asks any more which values share their memory."""
    known: dict[Any, torch.Tensor] = {}

    def shared(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        bits = (leaf.is_conj(), leaf.is_neg(), leaf.requires_grad)
        return known.setdefault((type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, bits), leaf)

    for node in graph.nodes:
        node.meta = {name: note for name, note in node.meta.items() if name in ("val", "recorded")}
        if "val" in node.meta:
            node.meta["val"] = map_leaves(node.meta["val"], shared)
