"""Gradients that are asked for of lazy values, and hooks on them.

*Takes* the arguments of `backward`, `torch.autograd.grad`, `register_hook` and their relatives. *Gives* a request to
the engine where something must run, else a recorded call.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from koila._torch import tensor_hooks
from koila._torch.transforms import active_transform
from koila.capture.advice import warn_of_eager_program
from koila.capture.bridge import Bridge
from koila.capture.pending import recorder
from koila.capture.record import input_value, realize, record
from koila.capture.scan import Scan, scan_call
from koila.errors import CaptureError
from koila.ir.graph import collect
from koila.ir.node import HOOKS, Value
from koila.ir.prepass import Inference, Output, PrePass, prepass_of
from koila.ir.replay import current_context
from koila.ir.second_order import goes_behind, gradients_requiring_grad
from koila.ir.source import user_site
from koila.ir.tree import map_leaves

Handler = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class BackwardRequest:
    """A backward pass asked for on lazy tensors: the arguments of `torch.autograd.backward`."""

    roots: tuple[Value | torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    retain_graph: bool
    create_graph: bool
    inputs: tuple[Value | torch.Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class GradRequest:
    """Gradients asked for on real tensors: the arguments of `torch.autograd.grad`."""

    outputs: tuple[Value | torch.Tensor, ...]
    inputs: tuple[Value | torch.Tensor, ...]
    seeds: tuple[torch.Tensor | None, ...] | None
    options: dict[str, Any]


def _unwrap(tensor: Any) -> Any:
    return tensor._value if type(tensor) is Bridge.lazy_type else tensor


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if value is None or isinstance(value, torch.Tensor) else tuple(value)


def backward_of(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` of lazy tensors: one request to the engine."""
    if grad_tensors is None and grad_variables is None and inputs is None and _is_plain_loss(tensors, create_graph):
        warn_of_eager_program()
        Bridge.realizer.backward_from(tensors, bool(retain_graph))
        return
    roots = _as_tuple(tensors)
    given = _as_tuple(grad_tensors if grad_tensors is not None else grad_variables)
    gradients = given if len(given) == len(roots) else given * len(roots)
    real = [grad.run() if type(grad) is Bridge.lazy_type else grad for grad in gradients]
    keep = create_graph if retain_graph is None else retain_graph
    if inputs is not None and any(_inner(tensor) is not None for tensor in _as_tuple(inputs)):
        _accumulate(inputs, gradients_of(roots, inputs, tuple(real), keep, create_graph))
        return
    wanted = None if inputs is None else tuple(_unwrap(tensor) for tensor in _as_tuple(inputs))
    request = BackwardRequest(tuple(_unwrap(root) for root in roots), tuple(real), keep, create_graph, wanted)
    warn_of_eager_program()
    Bridge.realizer.backward(request)


def _is_plain_loss(tensor: Any, create_graph: bool) -> bool:
    """Whether a backward pass starts from one scalar, which a call gave that has no node yet."""
    if create_graph or type(tensor) is not Bridge.lazy_type or tensor._held is not None:
        return False
    known: PrePass = tensor._prepass
    if not known.dtype.is_floating_point or (known.shape and math.prod(known.shape) != 1):
        return False
    return known.requires_grad or bool(tensor.requires_grad)


def _accumulate(inputs: Any, gradients: Any) -> None:
    """What a backward pass does with the gradients of `inputs` that are no leaves."""
    for tensor, gradient in zip(_as_tuple(inputs), gradients, strict=True):
        found = _real_seed(gradient)
        tensor.grad = found if tensor.grad is None else tensor.grad + found


def backward(
    self: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """`Tensor.backward`."""
    backward_of(self, gradient, retain_graph, create_graph, inputs=inputs)


def gradients_of(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Recorded like any other call: its results have the layout of its inputs."""
    args = (outputs, inputs, grad_outputs, retain_graph, create_graph, only_inputs, allow_unused, is_grads_batched)
    scan, cacheable = scan_call(torch.autograd.grad, args, {})
    in_general = allow_unused or is_grads_batched or materialize_grads or scan.foreign is not None
    is_recorded = not in_general and active_transform() is None
    if not is_recorded or _have_hooks(outputs, inputs) or not _is_one_program(outputs, inputs):
        options = {
            "retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": allow_unused,
            "is_grads_batched": is_grads_batched, "materialize_grads": materialize_grads,
        }  # fmt: skip
        found = _grad_on_real(outputs, inputs, grad_outputs, options)
        return map_leaves(found, _as_lazy) if is_recorded else found
    grads = _second_order(outputs, inputs, grad_outputs) if create_graph else (False,) * len(_as_tuple(inputs))
    metas = tuple(Output(_prepass(each).with_grad(grad)) for each, grad in zip(_as_tuple(inputs), grads, strict=True))
    return record_apart(torch.autograd.grad, scan, Inference(metas, metas, ordered=True), cacheable)


def record_apart(func: Handler, scan: Scan, inference: Inference, cacheable: bool) -> Any:
    """Record a call that the trie does not know: what comes after it is another program than without it."""
    recorder.log.trie.leave()
    return record(func, scan, inference, current_context(), cacheable)


def _second_order(outputs: Any, inputs: Any, grad_outputs: Any) -> tuple[bool, ...]:
    """Which gradients require grad, as those that are made with `create_graph=True` may."""
    roots = [root._value for root in _as_tuple(outputs) if type(root) is Bridge.lazy_type]
    pending = [root for root in roots if root.real is None]
    seeds = (seed for seed in _as_tuple(grad_outputs) if seed is not None)
    if len(pending) < len(_as_tuple(outputs)) or any(seed.requires_grad for seed in seeds):
        return (True,) * len(_as_tuple(inputs))
    return gradients_requiring_grad(collect(pending, []), [_unwrap(each) for each in _as_tuple(inputs)])


def _have_hooks(outputs: Any, inputs: Any) -> bool:
    """Whether hooks of the user's are called on the way, now: when the call ran, there might be others, or nobody might
    ask for the gradients."""
    reals = (each.real if isinstance(each, Value) else each for each in map(_unwrap, _as_tuple(inputs)))
    roots = [root for root in map(_unwrap, _as_tuple(outputs)) if isinstance(root, Value) and root.real is None]
    is_hooked = any(node.func in HOOKS for node in collect(roots, []).nodes)
    return is_hooked or any(tensor_hooks(real) for real in reals if real is not None)


def _is_one_program(outputs: Any, inputs: Any) -> bool:
    """Whether the inputs are leaves, or lie in the pending program of the outputs: then the call can be recorded."""
    pending = [root._value for root in _as_tuple(outputs) if type(root) is Bridge.lazy_type]
    inner = [value for each in _as_tuple(inputs) if (value := _inner(each)) is not None]
    graph = collect([value for value in pending if value.real is None], [])
    if goes_behind(graph, [_unwrap(each) for each in _as_tuple(inputs)]):
        return False
    if not inner:
        return bool(pending) or any(type(each) is Bridge.lazy_type for each in _as_tuple(inputs))
    if len(pending) < len(_as_tuple(outputs)) or any(value.real is not None for value in pending):
        return False
    is_known = all(value.node is None or value.node in graph.positions for value in inner)
    return is_known and not Bridge.realizer.is_inside(inner, graph.leaves)


def _inner(tensor: Any) -> Value | None:
    """The value of a lazy tensor that is no leaf of autograd; None for any other tensor."""
    if type(tensor) is not Bridge.lazy_type:
        return None
    value: Value = tensor._value
    return value if value.node is not None or (value.real is not None and not value.real.is_leaf) else None


def _grad_on_real(outputs: Any, inputs: Any, grad_outputs: Any, options: dict[str, Any]) -> Any:
    """Which results are None depends on the graph, and so does whether the inputs are on it: run first, then ask it."""
    seeds = None if grad_outputs is None else map_leaves(_as_tuple(grad_outputs), _real_seed)
    reals = [tuple(map(_unwrap, _as_tuple(each))) for each in (outputs, inputs)]
    return Bridge.realizer.grad(GradRequest(reals[0], reals[1], seeds, options))


def _as_lazy(tensor: Any) -> Any:
    return Bridge.lazy_type._wrap(input_value(tensor))


def _real_seed(seed: Any) -> Any:
    return realize(seed._value, "autograd.grad") if type(seed) is Bridge.lazy_type else seed


def _prepass(tensor: Any) -> Any:
    if type(tensor) is Bridge.lazy_type:
        return tensor._value.prepass.with_batch(None)
    return prepass_of(tensor)


def hook_on_graph(method: Handler) -> Handler:
    """Hooks: recorded at their place in the program, called by autograd in the run, never while tracing."""

    def note(self: Any, *args: Any) -> Any:
        check_not_passed_by(self._value, method.__name__)
        if self._value.real is not None:
            return method(self._value.real, *args)
        hooks: OrderedDict[int, Any] = OrderedDict()
        handle = RemovableHandle(hooks)
        wrapped = [_while_registered(hooks, handle.id, hook) for hook in args]
        hooks.update(dict.fromkeys([handle.id], args[0] if args else None))
        scan, _ = scan_call(method, (self, *wrapped), {})
        inference = Inference(None, (), writes=(0,), write_grads=(self.requires_grad,), ordered=True)
        record_apart(method, scan, inference, cacheable=not args)
        return handle if args else None

    return note


def check_not_passed_by(value: Value, what: str) -> None:
    """What was computed from a value in chunks does not pass through it any more: a hook there would be dropped."""
    if value.requires_grad and Bridge.realizer.is_passed_by(value):
        raise CaptureError(
            f"{what} on a value from which others were computed in chunks already: their gradients do not pass there",
            where=str(user_site()),
            hint="call it before anything that needs the value is read (.item()), or read that without a budget",
        )


def _while_registered(hooks: Mapping[int, Any], key: int, hook: Handler) -> Handler:
    def call(gradient: torch.Tensor) -> Any:
        return hook(gradient) if key in hooks else None

    return call


def requires_grad_(self: Any, requires_grad: bool = True) -> Any:
    """`Tensor.requires_grad_`: done at once on an input, recorded on what is pending."""
    value = self._value
    if value.real is not None and not value.storage.writers:
        value.real.requires_grad_(requires_grad)
        value.prepass = value.prepass.with_grad(requires_grad)
        return self
    if value.prepass.requires_grad == requires_grad:
        return self
    scan, cacheable = scan_call(torch.Tensor.requires_grad_, (self, requires_grad), {})
    output = Output(value.prepass.with_grad(requires_grad), same_as=0)
    inference = Inference(output, (output,), writes=(0,), write_grads=(requires_grad,), ordered=True)
    return record_apart(torch.Tensor.requires_grad_, scan, inference, cacheable)
