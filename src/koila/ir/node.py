"""The one node type of the recorded program, and the values and storages between nodes.

*Takes* a torch function with its arguments. *Gives* `Node` (also called `LazyFunction`), `Value` and `Storage`.

A program is recorded as the calls it made, in order. Aliasing is kept as PyTorch has it: values that share memory
share a `Storage`, and a storage knows the nodes that wrote to it. Replaying the calls in order on real tensors is
therefore eager execution itself. What a value needs is its producer, the producer's operands, and every earlier
write to their storages; nodes that nobody needs are garbage like any other Python object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from koila._scopes import moments
from koila._torch import write_count
from koila.errors import BudgetError
from koila.ir.prepass import Inference, PrePass
from koila.ir.source import Site


class Storage:
    """Memory that several values may share."""

    writers: Any = ()
    """The nodes that write to it, in order; a list as soon as there was one."""
    readers: Any = ()
    """References to the nodes that read it, likewise."""
    with_grad: tuple[int, ...] = ()
    """The families of its values that require grad because one of them was written to."""

    def __init__(self, real: bool = False) -> None:
        self.real = real
        """Whether it is the memory of a real tensor: a write to it is an effect that must happen."""

    def add_reader(self, reference: weakref.ref[Node]) -> None:
        """A call was recorded that reads it. Most storages never have any: the list is made for the first one, in one
        step, because another thread may be recording, too."""
        self.__dict__.setdefault("readers", []).append(reference)

    def add_writer(self, node: Node) -> None:
        """A call was recorded that writes to it."""
        self.__dict__.setdefault("writers", []).append(node)

    def forget(self, executed: Container[Node]) -> None:
        """These nodes have run. Each entry is removed by itself: another thread may be recording a new one."""
        for writer in list(self.writers):
            if writer in executed:
                self.writers.remove(writer)
        for reader in list(self.readers):
            node = reader()
            if node is None or node in executed:
                self.readers.remove(reader)


class Value:
    """One tensor of the recorded program; pending until it is bound to a real tensor."""

    # What most values never have stands here once: an input is made for each tensor of each step.

    real: torch.Tensor | None = None
    """The real tensor it is bound to."""
    budget: int | None = None
    """Bytes that a run may allocate that starts from this value: what `koila.lazy` was told, for inputs and for what
    was computed from them."""
    backward_peak_bytes: int | None = None
    """What its run and its backward pass allocate at their peak, where an unsplit run was projected with both."""
    position: tuple[int, int] = (-1, -1)
    """(recording epoch, number within it): its name while the trie is walked."""
    holders: tuple[weakref.ref[Any], ...] = ()
    """The LazyTensors that are this value; the user may hold several."""
    is_view = False
    is_base = False
    """Whether its memory was made for it."""
    family = 0
    """Which values of its memory autograd knows to be views of one of them: a write to one reaches the others. What
    `detach` gives shares the memory only: it and its views are another family."""
    keep = False
    """Whether the user asked for it to be a result of the run that computes it."""

    def __init__(self, prepass: PrePass, storage: Storage, node: Node | None, index: int) -> None:
        self.prepass = prepass
        self.storage = storage
        self.node = node
        """The producer; None for an input and after binding."""
        self.index = index
        """Which result of the producer it is."""

    @property
    def requires_grad(self) -> bool:
        if self.real is not None:  # A write to a tensor that it is a view of may have changed it.
            return self.real.requires_grad
        return self.prepass.requires_grad or self.family in self.storage.with_grad

    @property
    def batch(self) -> int | None:
        """The batch dimension, where it is known; see `PrePass.batch`."""
        return self.prepass.batch

    @batch.setter
    def batch(self, dim: int | None) -> None:
        self.prepass = self.prepass.with_batch(dim)

    @property
    def is_held(self) -> bool:
        """Whether the user still holds it."""
        return any(holder() is not None for holder in self.holders)

    def hold(self, tensor: Any) -> None:
        """A LazyTensor is this value from now on."""
        alive = [holder for holder in self.holders if holder() is not None]
        self.holders = (*alive, weakref.ref(tensor))

    def release(self, tensor: Any) -> None:
        """A LazyTensor has become another value."""
        self.holders = tuple(holder for holder in self.holders if holder() is not tensor)

    def bind(self, real: torch.Tensor) -> None:
        """From now on the value is this tensor."""
        self.real = real
        self.node = None
        self.storage.real = True


class Node:
    """One recorded call of a torch function."""

    __slots__ = (
        "__weakref__",
        "_outputs",
        "args",
        "context",
        "depth",
        "done",
        "draws",
        "due",
        "failed",
        "freed",
        "func",
        "inference",
        "key",
        "kwargs",
        "left_behind",
        "operands",
        "refusal",
        "sequence",
        "site",
        "slots",
        "storages",
        "versions",
    )

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: tuple[Value | torch.Tensor, ...],
        inference: Inference,
        context: Any,
        site: Site,
    ) -> None:
        self.func = func
        self.args = args
        """Arguments with every LazyTensor replaced by its Value."""
        self.kwargs = kwargs
        self.operands = operands
        """All tensors among the arguments, in order: Values and real tensors."""
        self.inference = inference
        self.context = context
        """Grad mode, autocast and default dtype at the time of the call."""
        self.site = site
        self.sequence = next(moments)
        self.draws: list[Any] = []
        """One source per random operator inside the call."""
        self.failed = False
        """Whether a run of it failed: it runs again, with its write, only for somebody who asks for its value."""
        self.freed: int | None = None
        """The backward pass without `retain_graph` that went through it: eager has freed what it saved for it."""
        self.due = False
        """Whether it writes to a real tensor (running statistics) and no run has done so yet."""
        self.left_behind = False
        """Whether an optimizer step came while it was pending and did not fit: writes do not wait for it any more."""
        self.done = False
        """Whether a run has executed it; a value of it that was too large to keep can still be asked for."""
        self.versions: tuple[tuple[int, int, bool] | None, ...] = ()
        """`version_of` each operand when the call was recorded; None for a pending one."""
        self.refusal: BudgetError | None = None
        """Why it did not run before one of its operands was changed, if a budget was the reason."""
        self.slots: tuple[float, ...] = ()
        """Python numbers that are not part of the program's key, in order of appearance."""
        self.storages: list[Storage] = []
        """Storages of real operands that pending calls share."""
        self.depth: int = 1 + max((v.node.depth for v in self.values() if v.node is not None), default=0)
        """The longest chain of pending calls behind it."""
        self.key: Any = None
        """(function, static arguments, context): the node's own part of the program's key."""
        self._outputs: list[weakref.ref[Value] | None] = [None] * len(inference.outputs)

    @property
    def name(self) -> str:
        """The name of the torch function."""
        return function_name(self.func)

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results."""
        return tuple(output.prepass.shape for output in self.inference.outputs)

    def set_output(self, index: int, value: Value) -> None:
        self._outputs[index] = weakref.ref(value)

    def output(self, index: int) -> Value | None:
        """A result, if anything still refers to it."""
        reference = self._outputs[index]
        return None if reference is None else reference()

    @property
    def is_open(self) -> bool:
        """Whether a run has yet to execute it: it never was, or a result of it can still be asked for."""
        outputs = (self.output(index) for index in range(self.num_outputs))
        return not self.done or any(value is not None and value.node is not None for value in outputs)

    def waiting(self) -> list[Value]:
        """Results that the user holds and that have no data yet; a run may have computed and released them."""
        outputs = (self.output(index) for index in range(self.num_outputs))
        return [value for value in outputs if value is not None and value.node is not None and value.is_held]

    def values(self) -> Iterator[Value]:
        """Pending or bound values among the operands."""
        return (operand for operand in self.operands if isinstance(operand, Value))

    def note_change(
        self, is_changed: Callable[[Value | torch.Tensor], bool], refusal: BudgetError | None
    ) -> None:  # fmt: skip
        """Operands that are changed now without a new version: the call is stale, should it ever run.

        Args:
            is_changed: Whether an operand is changed.
            refusal: Why the call did not run before, if a budget was the reason.
        """
        self.refusal = refusal or self.refusal
        pairs = zip(self.operands, self.versions, strict=True)
        self.versions = tuple([_CHANGED if is_changed(operand) else version for operand, version in pairs])

    @property
    def has_changed(self) -> bool:
        """Whether `note_change` was called: it can never run again."""
        return _CHANGED in self.versions

    def __repr__(self) -> str:
        return f"<{self.name} #{self.sequence} {list(self.inference.outputs)}>"


LazyFunction = Node

_CHANGED = (-1, 0, False)
"""Equal to no version."""

HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.retain_grad})
"""Calls that hang something of the user's on autograd's graph."""


def function_name(func: Callable[..., Any]) -> str:
    """A readable name: `linear`, `Tensor.add_`, `Tensor.T`."""
    if getattr(func, "__name__", "") == "__get__":
        return f"Tensor.{getattr(func.__self__, '__name__', '?')}"  # type: ignore[attr-defined]
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or func
    if str(name).startswith("pybind11_"):  # An operator of `torch.ops`.
        name = f"{func.__module__.rpartition('.')[2]}.{func.__name__}"
    return str(name).replace("TensorBase", "Tensor").removeprefix("_VariableFunctionsClass.")


def version_of(operand: Value | torch.Tensor) -> tuple[int, int, bool] | None:
    """What tells whether a real operand was changed: its version, where its data lies, whether it requires grad."""
    tensor = operand.real if isinstance(operand, Value) else operand
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else write_count(tensor)
    return version, tensor.data_ptr() if tensor.layout == torch.strided else 0, tensor.requires_grad
