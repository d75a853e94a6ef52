"""LazyTensor: a tensor whose operations are recorded instead of run.

*Takes* torch calls through `__torch_function__`. *Gives* more lazy tensors; a real one when data is asked for. What
reaches `__torch_dispatch__` was not recorded: it is run on real tensors and counted, never wrong.
"""

from __future__ import annotations

import html
import weakref
from collections.abc import Callable
from functools import partial
from sys import _getframe
from typing import Any, NoReturn

import torch

from koila import events
from koila._torch import (
    PYTHON_KEY,
    is_function_mode_enabled,
    is_key_excluded,
    ordinary_dispatch,
    throw_on_data_access,
)
from koila.capture.advice import begin_program, leaving_worker, note_worker
from koila.capture.at_once import here, watch
from koila.capture.bridge import Bridge
from koila.capture.carried import run_carried
from koila.capture.gradients import backward_of
from koila.capture.known import Origin
from koila.capture.log import MAX_VALUES, Log
from koila.capture.lookup import implementation, known_implementations, lookup_function, lookup_method
from koila.capture.patches import install
from koila.capture.pending import recorder
from koila.capture.record import budget_of, input_value, may_write, real_of, realize
from koila.capture.repeat import NOT_KNOWN, repeat
from koila.capture.template import wrapper_maker
from koila.errors import CaptureError
from koila.interfaces import BatchedPair, BatchInfo, RunnableTensor
from koila.ir.graph import collect
from koila.ir.node import Value
from koila.ir.prepass import PrePass, is_plain
from koila.ir.source import user_frame, user_site
from koila.ir.tree import map_leaves


class _LazyMeta(type(torch.Tensor)):  # type: ignore[misc]
    """Makes `isinstance` give one answer for a step, whether it is recorded or run at once."""

    def __instancecheck__(cls, instance: object) -> bool:
        return issubclass(type(instance), (cls, Bridge.eager_type))


class LazyTensor(torch.Tensor, metaclass=_LazyMeta):
    """A pending tensor: true shape, dtype, device and strides, no storage.

    An `EagerTensor` answers `isinstance(x, koila.LazyTensor)` as a lazy tensor does: with `eager="auto"` a step may
    be run by either, and a program that asks must not take another way.

    Made by `koila.lazy`; `LazyTensor(tensor, batch=0)` is `koila.lazy(tensor, batch=0)`. The class's own conversions
    are named after PyTorch's lazy core.

    >>> import koila
    >>> x = koila.lazy(torch.arange(3.0))
    >>> (x * 2).run()
    tensor([0., 2., 4.])
    """

    _held: Value | None = None
    """Its value; None as long as it is the result of a call that has no node yet (see `koila.capture.log`)."""
    _prepass: PrePass
    """What is known about it then."""
    _name: int = -1
    """The number of its value among all that were recorded; -1 for an input."""
    _log: Log
    """Where it was recorded."""
    _origin: Origin | None = None
    """The result of a known program that it is, in a step that is watched; see `koila.capture.at_once`."""

    def __new__(cls, tensor: torch.Tensor, batch: int | None = 0) -> LazyTensor:
        if not isinstance(tensor, torch.Tensor):
            refuse(
                f"LazyTensor takes a tensor, got a {type(tensor).__name__}", "koila.lazy takes any structure of tensors"
            )
        if type(tensor) is LazyTensor:
            return tensor
        install()
        run_carried()
        begin_program(user_frame(_getframe(1)))
        note_worker()
        real = real_tensor(tensor)
        if not is_plain(real):
            refuse(
                f"LazyTensor takes a plain strided tensor, got a {type(real).__name__} of layout {real.layout}",
                "koila.lazy leaves such tensors as they are: calls on them run eagerly",
            )
        return LazyTensor._wrap(input_value(real, batch))

    @staticmethod
    def _wrap(value: Value) -> LazyTensor:
        prepass = value.prepass
        make = prepass.make_wrapper
        if make is None:
            make = prepass.make_wrapper = wrapper_maker(prepass)
        # Autograd in C++ must not build a graph on the wrapper: requires_grad is answered below.
        wrapper: LazyTensor = make()
        throw_on_data_access(wrapper)
        wrapper._held, wrapper._log = value, recorder.place.log
        if value.position[0] >= 0:
            wrapper._name = _name(value)
        # Nobody else can be this value yet, except after a shallow copy.
        value.holders = (weakref.ref(wrapper),) if not value.holders else (*value.holders, weakref.ref(wrapper))
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and Bridge.eager_type in types:
            args, kwargs = _with_inputs(func, args, kwargs or {})
        if here.position.watches and not is_key_excluded(PYTHON_KEY):
            return watch(func, types, args, kwargs)
        handler = known_implementations.get(func) or implementation(func)
        if type(handler) is partial:
            found = repeat(handler.args[0], args, kwargs)
            if found is not NOT_KNOWN:
                return found
        if is_key_excluded(PYTHON_KEY):  # Inside `torch.tensor([lazy])`: no fake tensor would be fake.
            with ordinary_dispatch():
                return handler(*args, **(kwargs or {}))
        return handler(*args, **kwargs) if kwargs else handler(*args)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        events.count(f"eager::{func}", site=user_site())
        swap = lambda leaf: realize(leaf._value, f"unrecorded {func}") if type(leaf) is LazyTensor else leaf  # noqa: E731
        # Below autograd here: put it back, so that what runs has the gradient of the real operands.
        with ordinary_dispatch():
            return func(*map_leaves(args, swap), **map_leaves(kwargs or {}, swap))

    @property
    def _value(self) -> Value:
        """Its value, in a program of which all calls have nodes."""
        if self._log.entries or self._held is None:  # None in a run of another thread: it is waited for.
            self._log.flush()
        assert self._held is not None
        return self._held

    @property
    def _known(self) -> PrePass:
        """What is known about it; no node is made. A call that was matched leaves all but `requires_grad` as it was."""
        return self._prepass if self._held is None else self._held.prepass

    # What can be asked without data.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._known.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._known.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._known.device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._known.shape)

    @property
    def requires_grad(self) -> bool:
        if self._held is None and (self._prepass.requires_grad or not self._log.writes):
            return self._prepass.requires_grad
        return self._value.requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        value = self._value
        if value.real is not None:
            return value.real.is_leaf
        # What `requires_grad_` was called on last is a leaf, too.
        last = value.storage.writers[-1] if value.storage.writers else None
        is_marked = last is not None and last.func is torch.Tensor.requires_grad_ and last.operands[0] is value
        return is_marked or not value.requires_grad

    @property
    def grad(self) -> torch.Tensor | None:
        return None if self._value.real is None else self._value.real.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if isinstance(gradient, LazyTensor):
            gradient = gradient.run()
        realize(self._value, "assignment of a gradient").grad = gradient

    @property
    def batch(self) -> BatchInfo | None:
        """The batch dimension of this value; None if it does not carry the batch.

        It is known for an input and for a result of a run. For a pending value the analysis proves it, which traces the
        value's program and runs nothing.
        """
        value = self._value
        if value.batch is not None:
            return BatchInfo(value.batch, value.prepass.shape[value.batch])
        if value.real is not None or not collect([value], []).batches:
            return None
        (found,) = Bridge.realizer.batches_of([value])
        if found is not None:
            value.batch = found.index  # An unsplit run does not ask, and it is known after it, too.
        return found

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        real, prepass = self._value.real, self._value.prepass
        if real is None or self._value.storage.writers:
            grad = ", requires_grad=True" if self._value.requires_grad else ""
            return f"LazyTensor({list(prepass.shape)}, dtype={prepass.dtype}, device={prepass.device}{grad}, pending)"
        indented = repr(real).replace("\n", "\n" + " " * len("LazyTensor("))
        return f"LazyTensor({indented}, ready)"

    def _repr_html_(self) -> str:
        """What a notebook shows: what `repr` shows, as it stands."""
        return f"<pre>{html.escape(repr(self))}</pre>"

    def __str__(self) -> str:
        return str(real_of(self, "str"))

    def run(self, partial: tuple[int, int] | None = None, *, detach: bool = False) -> torch.Tensor:
        """The real tensor; run if it is pending.

        Args:
            partial: Samples `(low, high)` of the batch to give; all of them if it is not given. Each is the one that
                the whole batch has, also where samples depend on each other.
            detach: Give a tensor without autograd history.

        >>> import koila
        >>> (koila.lazy(torch.arange(4.0)) * 2).run((1, 3))
        tensor([2., 4.])
        """
        wanted = self if partial is None else self._samples(partial)
        real = real_of(wanted, "run")
        return real.detach() if detach else real

    def _samples(self, partial: tuple[int, int]) -> LazyTensor:
        """A range of the batch, as one more recorded call."""
        found: LazyTensor = lookup_function(torch.narrow)(self, *range_of_batch(self, partial))
        return found

    def buffer_memory(self) -> BatchedPair:
        """What the pending program behind this value makes, in bytes: all its results, as if none were ever freed.

        A plan needs less: `koila.plan(value)` says how much. Nothing is run; the program is traced.

        Returns:
            Bytes for each sample, and bytes that do not depend on the batch.

        >>> import koila
        >>> (koila.lazy(torch.ones(4, 2)) * 2).buffer_memory()
        BatchedPair(batch=8, no_batch=0)
        """
        nodes = collect([self._value], []).nodes
        found = (node.output(index) for node in nodes for index in range(node.num_outputs))
        values = [value for value in found if value is not None and value.is_base]
        batches = Bridge.realizer.batches_of(values) if values else []
        sizes = [(value.prepass.num_bytes, batch) for value, batch in zip(values, batches, strict=True)]
        return BatchedPair(
            sum(size // batch.value for size, batch in sizes if batch is not None),
            sum(size for size, batch in sizes if batch is None),
        )

    # PyTorch's lazy core, under its names.

    def to_tensor(self, detached: bool = False) -> torch.Tensor:
        """The real tensor; with `detached` one that shares nothing with it."""
        real = real_of(self, "to_tensor")
        return real.detach().clone() if detached else real

    def set_tensor(self, tensor: torch.Tensor) -> None:
        """From now on this lazy tensor is `tensor`; what was pending for it is forgotten.

        Batch and budget stay. Another lazy tensor is not run: both are then the same value, which takes this budget if
        it has none.
        """
        budget = budget_of([self._value])
        if type(tensor) is LazyTensor:
            if budget_of([tensor._value]) is None:
                tensor._value.budget = budget
            self._adopt(tensor._value)
        else:
            self._adopt(input_value(real_tensor(tensor), self._value.batch, budget))

    def update_from_tensor(self, tensor: torch.Tensor, sync: bool = False) -> None:
        """Take the data of `tensor`, as `set_tensor` does; with `sync` a copy of the data as it is now."""
        self.set_tensor(real_tensor(tensor).detach().clone() if sync else tensor)

    def update_from_tensor_out(self, tensor: torch.Tensor) -> None:
        """Write `tensor` into this value, keeping its shape, dtype and aliases, as `out=` does."""
        if tuple(tensor.shape) != self._value.prepass.shape:
            raise CaptureError(
                f"cannot write {list(tensor.shape)} into a lazy tensor of shape {list(self._value.prepass.shape)}",
                where=str(user_site()),
                hint="use set_tensor, which takes any shape",
            )
        lookup_method("copy_")(self, tensor)

    def shallow_copy_to(self, destination: LazyTensor) -> None:
        """Let `destination` be the same value; see `set_tensor`."""
        destination.set_tensor(self)

    def data_value(self) -> Value:
        """The recorded value behind this tensor (`data()` of the lazy core; `data` is PyTorch's own attribute)."""
        return self._value

    def prepass(self) -> PrePass:
        """What is known before the value is computed (`shape()` of the lazy core)."""
        return self._value.prepass

    def _adopt(self, value: Value) -> None:
        program = here.position.program
        if program is not None:
            program.is_out = True  # A real tensor cannot become another one.
        self._value.release(self)
        self._held, self._name = value, _name(value)
        value.hold(self)

    # What most programs ask for, without the way through PyTorch's own dispatch.

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """As `torch.Tensor.backward`."""
        if is_function_mode_enabled():
            super().backward(gradient, retain_graph, create_graph, inputs)
        else:
            backward_of(self, gradient, retain_graph, create_graph, inputs=inputs)

    def item(self) -> Any:
        """As `torch.Tensor.item`."""
        return super().item() if is_function_mode_enabled() else real_of(self, "item").item()

    # Called by name, not through __torch_function__.

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return lookup_method("__array__")(self, *args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return lookup_method("__dlpack__")(self, *args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return lookup_method("__dlpack_device__")(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return leaving_worker(realize(self._value, "pickle")) or lookup_method("__reduce_ex__")(self, protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        real = realize(self._value, "deepcopy")
        value = input_value(real.__deepcopy__(memo), self._value.batch, budget_of([self._value]))
        copy = memo[id(self)] = LazyTensor._wrap(value)
        return copy


def range_of_batch(tensor: Any, partial: tuple[int, int]) -> tuple[int, int, int]:
    """Dimension, begin and length of a range of the batch, for `torch.narrow`."""
    batch = tensor.batch
    if batch is None:
        refuse(
            f"a range of the batch was asked for, and no batch is known in {list(tensor.shape)}",
            "value.run(), and slice what it gives; a value that was computed whole does not tell its batch",
        )
    if not (isinstance(partial, tuple) and len(partial) == 2 and all(type(each) is int for each in partial)):
        refuse(f"a range of the batch is (low, high), got {partial!r}", "value.run((0, 2)), value.run(detach=True)")
    low, high = partial
    if not 0 <= low <= high <= batch.value:
        refuse(f"samples {low} to {high} of a batch of {batch.value}", f"0 <= low <= high <= {batch.value}")
    return batch.index, low, high - low


def _name(value: Value) -> int:
    epoch, number = value.position
    return -1 if epoch < 0 else epoch * MAX_VALUES + number


def _with_inputs(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments in which eager tensors that may carry the batch are inputs of the recorded program; a call that may
    write to them gets the tensors themselves."""
    if type(implementation(func)) is not partial or may_write(func, kwargs):
        return args, kwargs

    def swap(leaf: Any) -> Any:
        is_input = type(leaf) is Bridge.eager_type and leaf._origin is not None and leaf._origin.batch is not None
        return as_input(leaf) if is_input else leaf

    return map_leaves(args, swap), map_leaves(kwargs, swap)


def as_input(eager: Any) -> LazyTensor:
    """An eager tensor as an input of what is recorded, with the gradient that it has."""
    origin = eager._origin
    lazy = LazyTensor._wrap(input_value(eager.run(), None if origin is None else origin.batch))
    lazy._origin = origin
    return lazy


def real_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The real tensor behind an eager or a lazy one; a plain tensor is its own."""
    return tensor.run() if isinstance(tensor, RunnableTensor) else tensor


def refuse(fact: str, hint: str) -> NoReturn:
    """Raise a capture error at the user's line."""
    raise CaptureError(fact, where=str(user_site()), hint=hint)


Bridge.lazy_type = LazyTensor
