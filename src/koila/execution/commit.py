"""The commit: what a run has computed becomes what the user sees, and until then can be taken back (Rule 4).

*Takes* tensors that a run may change, and its results. *Gives* scopes that restore the tensors on error, values
bound to real tensors, and the commit of effects.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from koila._torch import preserve_version
from koila.capture.gradients import BackwardRequest
from koila.errors import BudgetError
from koila.ir.failures import is_out_of_memory
from koila.ir.graph import Graph
from koila.ir.node import Node, Storage, Value
from koila.ir.source import user_site

Unless = Callable[[BaseException], bool]


def _never(error: BaseException) -> bool:
    return False


def is_from_user(error: BaseException) -> bool:
    """Whether an error was raised by the user's own code: a hook in the commit, which then behaves as in eager."""
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # An operator that fails under somebody's dispatch mode fails in the run, not in a hook.
    if any(frame.f_code.co_name == "__torch_dispatch__" for frame in frames):
        return False
    return str(frames[-1].f_globals.get("__name__", "")).split(".")[0] not in ("koila", "torch")


Copied = Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]
"""Tensors of one type on one device, and a copy of all that they were, one after the other."""
CopiedGradients = Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
"""Tensors, their gradients, and copies of what these were."""


def copied(tensors: Sequence[torch.Tensor]) -> Copied:
    """What tensors are now, for `restore`; running statistics are many and small, so a call copies all of a type."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [(kind, _joined(kind)) for kind in kinds.values()]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements. There is no scope without gradients here: an interrupt could keep it from being left."""
    return torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in tensors]).detach()


def restore(saved: Copied) -> None:
    """Let tensors be what they were; their versions do not tell."""
    for tensors, copy in saved:
        for tensor, part in zip(tensors, copy.split([tensor.numel() for tensor in tensors]), strict=True):
            with torch.no_grad(), preserve_version(tensor):
                tensor.detach().copy_(part.view(tensor.shape))


def copied_gradients(tensors: Iterable[torch.Tensor]) -> CopiedGradients:
    """What the gradients of different tensors are now, for `restore_gradients`."""
    return [(t, grad, None if grad is None else grad.detach().clone()) for t in tensors for grad in [t.grad]]


def restore_gradients(saved: CopiedGradients) -> None:
    """Let gradients be what they were."""
    for tensor, gradient, copy in saved:
        if gradient is not None and copy is not None:
            with torch.no_grad():
                gradient.copy_(copy)
        tensor.grad = gradient


@contextmanager
def restored_on_error(tensors: Sequence[torch.Tensor], unless: Unless = _never) -> Iterator[None]:
    """If the body raises, the tensors are as they were."""
    saved = copied(tensors)
    try:
        yield
    except BaseException as error:
        if not unless(error):
            restore(saved)
        raise


@contextmanager
def gradients_restored_on_error(tensors: Sequence[torch.Tensor], unless: Unless = _never) -> Iterator[None]:
    """If the body raises, the gradients of these leaves are as they were."""
    saved = copied_gradients({id(tensor): tensor for tensor in tensors}.values())
    try:
        yield
    except BaseException as error:
        if not unless(error):
            restore_gradients(saved)
        raise


MAX_WALK = 10_000
"""Autograd's nodes that are looked at: PyTorch crashes when 50,000 that Python has walked through are freed."""


def leaves_behind(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors whose .grad a backward from the roots may change."""
    found: dict[int, torch.Tensor] = {}
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while pending and len(seen) < MAX_WALK:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        edges = node.next_functions
        if edges:
            pending += [following for following, _ in edges if following is not None and following not in seen]
        elif isinstance(variable := getattr(node, "variable", None), torch.Tensor):
            found[id(variable)] = variable
    return list(found.values())


def write_effects(graph: Graph, written: dict[int, torch.Tensor], due: Iterable[Node]) -> None:
    """Write the new values of running statistics; eager hides these writes from the version, so koila does too.

    Args:
        graph: The program.
        written: By index of the leaf, its new value.
        due: The calls whose writes nobody has done yet. Others were run again for their values alone.
    """
    operands = [node.operands[index] for node in due for index in node.inference.hidden_writes]
    wanted = {id(each.real if isinstance(each, Value) else each) for each in operands}
    leaves = {index: graph.leaves[index] for index in written if id(graph.leaves[index]) in wanted}
    with restored_on_error(list(leaves.values())):
        for index, leaf in leaves.items():
            with torch.no_grad(), preserve_version(leaf):
                leaf.detach().copy_(written[index])


class Binding:
    """Values to be bound to the results of a run; what was executed is then no longer pending. It can be undone."""

    def __init__(self, nodes: Sequence[Node], results: dict[Value, torch.Tensor], budget: int | None) -> None:
        self._results, self._budget = results, budget
        self._nodes = [(node, node.done, node.due, node.failed, node.freed) for node in nodes]
        self._values = [(value, value.node, value.budget) for value in results]
        self._storages = [
            (storage, storage.real, list(storage.writers), list(storage.readers))
            for storage in _storages(nodes, results)
        ]

    def apply(self) -> None:
        """Bind them."""
        executed = {node for node, *_ in self._nodes}
        for node in executed:
            node.done, node.due, node.failed = True, False, False
        for value, real in self._results.items():
            value.bind(real)
            if self._budget is not None:  # Programs that start from a result keep to the budget of its inputs.
                value.budget = self._budget
        for storage, _, _, _ in self._storages:
            if storage.real:  # Else its values stay pending: whoever computes them again needs the writes again.
                storage.forget(executed)

    def undo(self) -> None:
        """Everything is pending again."""
        for node, done, due, failed, freed in self._nodes:
            node.done, node.due, node.failed, node.freed = done, due, failed, freed
        for value, maker, budget in self._values:
            value.real, value.node, value.budget = None, maker, budget
        for storage, real, writers, readers in self._storages:
            storage.real, storage.writers, storage.readers = real, writers, readers


@contextmanager
def undone_on_error(unless: Unless) -> Iterator[list[Binding]]:
    """If the body raises, even between two of its lines (Ctrl-C), the bindings in the list are undone."""
    made: list[Binding] = []
    try:
        yield made
    except BaseException as error:
        if not unless(error):
            for binding in reversed(made):
                binding.undo()
        raise


def commit(
    request: BackwardRequest, seeds: Sequence[torch.Tensor | None], changing: Sequence[torch.Tensor],
    can_be_repeated: bool = False,
) -> None:  # fmt: skip
    """PyTorch's own backward on real tensors, in one engine call.

    Args:
        request: The backward pass that is asked for.
        seeds: One for each of its roots.
        changing: Tensors whose gradients are restored if it fails.
        can_be_repeated: Whether everything is as it was then, so that a smaller plan may try again.
    """
    saved = copied_gradients({id(tensor): tensor for tensor in changing}.values())
    try:
        # No `with` statement: an interrupt at its end would restore gradients whose graph is freed.
        _backward_on_real(request, seeds)
    except BaseException as error:
        if not is_from_user(error):
            restore_gradients(saved)
        if is_out_of_memory(error) and not can_be_repeated:
            raise BudgetError(
                f"memory ran out while gradients were computed or added: {str(error).splitlines()[0]}",
                where=f"the backward pass at {user_site()}",
                hint="name a budget before the forward pass: koila.lazy(x, budget=...)",
            ) from error
        raise


def _backward_on_real(request: BackwardRequest, seeds: Sequence[torch.Tensor | None]) -> None:
    roots = [_real(root) for root in request.roots]
    inputs = None if request.inputs is None else [_real(tensor) for tensor in request.inputs]
    torch.autograd.backward(
        roots, list(seeds), retain_graph=request.retain_graph, create_graph=request.create_graph, inputs=inputs
    )


def _real(tensor: Value | torch.Tensor) -> torch.Tensor:
    real = tensor.real if isinstance(tensor, Value) else tensor
    assert real is not None
    return real


def _storages(nodes: Sequence[Node], results: dict[Value, torch.Tensor]) -> set[Storage]:
    found = {value.storage for node in nodes for value in node.values()}
    found.update(storage for node in nodes for storage in node.storages)
    found.update(value.storage for value in results)
    return found


def forget_writes(nodes: Sequence[Node]) -> None:
    """Forget the writes to values inside of a program that has run, if nobody can ask for any part of it again.

    A call that writes to a value holds it, and the memory of the value holds the call: without this, the nodes and the
    inputs of the program would stay until Python's collector comes by.
    """
    if not any(node.inference.writes for node in nodes):
        return
    outputs = (node.output(index) for node in nodes for index in range(node.num_outputs))
    released = [value for value in outputs if value is not None and value.node is not None]
    executed, storages = set(nodes), {value.storage for value in released}
    readers = (reader() for storage in storages for reader in storage.readers)
    if any(reader is not None and reader not in executed for reader in readers):
        return
    if all(node.done for node in nodes) and not any(value.is_held for value in released):
        for storage in storages:
            storage.forget(executed)


def give_up(nodes: Sequence[Node]) -> None:
    """A run that failed leaves nothing behind that every later run would try again (Rule 4)."""
    failed = set(nodes)
    for node in nodes:
        node.failed = True
    for storage in {storage for node in nodes for storage in node.storages}:
        storage.forget(failed)
