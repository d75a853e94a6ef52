"""The eager history of a program's leaves: code that ran before the program, and its share of a backward pass.

*Takes* the leaves of a program. *Gives* bytes: what autograd holds for those that have a history (a position embedding,
the kernel of a state-space layer), and what it will allocate when their gradients are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod
from typing import Any

import torch

from koila._torch import SAVED_PREFIX, input_metadata, sequence_number, storage_key, without_modes
from koila.ir import tree


@dataclass(frozen=True, slots=True)
class EagerHistory:
    """Bytes of the eager code that made some leaves."""

    held_bytes: int
    """The leaves, and what autograd saved to differentiate them."""
    backward_bytes: int
    """What their backward allocates at its peak, gradients of its own parameters included."""


Rerun = Callable[[Any, int], int]
"""The node of a program that koila runs again, and the bytes that are alive by then → what it will allocate."""


def eager_history(leaves: Iterable[torch.Tensor], rerun: Rerun = lambda node, alive: 0) -> EagerHistory:
    """What stands behind leaves that have a `grad_fn`; `rerun` knows about programs of koila's among it.

    >>> x = torch.ones(256, requires_grad=True)
    >>> eager_history([x]), eager_history([x.exp()]).held_bytes
    (EagerHistory(held_bytes=0, backward_bytes=0), 1024)
    """
    made = [leaf for leaf in leaves if leaf.grad_fn is not None]
    if not made:
        return _NOTHING
    nodes = list(_history(leaf.grad_fn for leaf in made))
    parameters = (node.variable for node in nodes if hasattr(node, "variable"))
    own = {storage_key(tensor.untyped_storage()) for tensor in parameters if tensor.layout == torch.strided}
    held = {
        storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
        for tensor in (*made, *(saved for node in nodes for saved in _saved(node)))
        if tensor.layout == torch.strided and not (tensor.is_leaf and tensor.requires_grad)
    }
    kept = sum(size for storage, size in held.items() if storage not in own)
    backward = _backward_bytes([leaf.grad_fn for leaf in made], lambda node, now: rerun(node, kept + now))
    return EagerHistory(kept, backward)


_NOTHING = EagerHistory(0, 0)
OWN_NODE = "SegmentBackward"
"""The autograd node of a program that koila runs again; what stands behind it is part of that program's own history."""


def _following(node: Any) -> list[Any]:
    if node.name() == OWN_NODE:
        return []
    return [following for following, _ in node.next_functions if following is not None]


def _history(roots: Iterable[Any]) -> Iterator[Any]:
    pending, seen = list(roots), set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += _following(node)
            yield node


def _saved(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if name.startswith(SAVED_PREFIX):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # It was freed by a backward pass.
                continue
            members = saved if isinstance(saved, (tuple, list)) else (saved,)
            # What a hook of the user's packed may be anything.
            yield from (leaf for leaf in tree.leaves([each.data for each in members]) if isinstance(leaf, torch.Tensor))


def _gradient_bytes(node: Any) -> int:
    """Bytes of the gradients that a node receives."""
    return sum(prod(each.shape) * each.dtype.itemsize for each in input_metadata(node) if each is not None)


def _sparse_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a sparse matrix; 0 for any other tensor."""
    if tensor.layout != torch.sparse_coo:
        return 0
    with without_modes():  # A tracker would take its parts for new memory.
        return sum(part.numel() * part.element_size() for part in (tensor._indices(), tensor._values()))


def _backward_bytes(roots: list[Any], rerun: Rerun) -> int:
    """The peak of autograd's own walk: latest nodes first; the gradients of the roots are somebody else's.

    A node that gives gradients of another shape needs as much beside as it receives: a product is made before it is
    summed to an operand's shape.
    """
    waiting: dict[Any, int] = dict.fromkeys(roots, 0)
    queue = [(-sequence_number(root), number, root) for number, root in enumerate(waiting)]
    queue.sort()
    now = peak = 0
    while queue:
        _, _, node = heappop(queue)
        if node.name() == OWN_NODE:
            peak = max(peak, now + rerun(node, now))
            for each, _ in node.next_functions:  # Gradients of one parameter are added up as they come.
                if each is not None and each not in waiting:
                    waiting[each] = _gradient_bytes(each)
                    now += waiting[each]
            now -= waiting[node]
            continue
        following, received = _following(node), _gradient_bytes(node)
        beside = received if any(_gradient_bytes(each) != received for each in following) else 0
        beside += 2 * sum(map(_sparse_bytes, _saved(node)))  # Transposed, and then sorted.
        peak = max(peak, now + beside + sum(map(_gradient_bytes, following)))
        for each in following:
            if each not in waiting:
                waiting[each] = _gradient_bytes(each)
                now += waiting[each]
                if not hasattr(each, "variable"):  # The gradient of a parameter stays.
                    heappush(queue, (-sequence_number(each), len(waiting), each))
        now -= waiting[node]
    return peak
