"""The operator that hands values to a lowered module: `call_delegate`.

Takes: a lowered module and its inputs, under any of PyTorch's dispatch keys and modes.
Gives: the results of the backend, with a real gradient; one node per call in a trace; shapes only, on fake tensors.

PyTorch has an operator of this name, `torch.ops.higher_order.executorch_call_delegate`. It runs the original module
instead of the lowered one and gives no gradient, and its kernels cannot be replaced without changing it for everybody.
`call_delegate` is therefore an operator of its own that bears the same name, because export's verifier and Dynamo
know delegates by name. It is kept out of PyTorch's table of operators, and it says that it lives in this module, so
that the code of a traced graph calls this operator and not PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch

from koila import events
from koila._torch import FakeTensor, get_proxy_mode
from koila._torch.delegates import (
    DispatchKey,
    HigherOrderOperator,
    ProxyTorchDispatchMode,
    TransformType,
    below_autograd,
    current_mode,
    disable_proxy_modes_tracing,
    dispatch_keys,
    higher_order_operators,
    pytree,
    register_fake,
    track_tensor_tree,
)
from koila._torch.transforms import has_tangent
from koila.delegates.gradient import Surroundings
from koila.delegates.original import without_aliases
from koila.errors import DelegateError
from koila.ir.source import user_site

__all__ = [
    "call_delegate",
    "executorch_call_delegate",
    "get_lowered_module_name",
    "is_lowered_module",
    "trace_call_delegate",
    "unwrap_immutable",
]

OPERATOR_NAME = "executorch_call_delegate"
LOWERED_BACKEND_MODULE_TYPE = "LoweredBackendModule"


class CallDelegate(HigherOrderOperator):
    """``call_delegate(lowered_module, *inputs)``: the results of the lowered module on its inputs."""

    def __init__(self) -> None:
        native = higher_order_operators[OPERATOR_NAME]
        super().__init__(OPERATOR_NAME)
        higher_order_operators[OPERATOR_NAME] = native
        self.__module__ = __name__

    def __call__(self, lowered_module: Any, /, *args: Any) -> Any:
        if not is_lowered_module(lowered_module):
            raise DelegateError(
                f"the first argument of call_delegate must be a {LOWERED_BACKEND_MODULE_TYPE}, "
                f"got {type(lowered_module).__name__}",
                hint="koila.delegates.to_backend makes one",
            )
        return super().__call__(lowered_module, *args)

    def dispatch(self, /, dispatch_key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
        """Let modes that know nothing of delegates (counters, memory trackers) see the operators inside."""
        mode = current_mode() if dispatch_key == DispatchKey.Python else None
        if mode is None or type(mode) in self.python_key_table or mode.supports_higher_order_operators:
            return super().dispatch(dispatch_key, *args, **kwargs)
        return call_delegate_cpu(*args, **kwargs)

    def _get_overloaded_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        # PyTorch looks one list deep only; arguments here may be nested further.
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        return tuple(t for t in leaves if isinstance(t, torch.Tensor) and dispatch_keys(t).has("Python"))


call_delegate = CallDelegate()
executorch_call_delegate = call_delegate
"""The same operator under the name that FX writes when a graph is pickled."""


def is_lowered_module(obj: object) -> bool:
    """Whether an object is a lowered module, known by the name of its class as everywhere in PyTorch.

    >>> is_lowered_module(torch.nn.Linear(1, 1))
    False
    """
    return type(obj).__name__ == LOWERED_BACKEND_MODULE_TYPE


def get_lowered_module_name(root: torch.nn.Module, lowered_module: torch.nn.Module) -> str:
    """Add a lowered module to a root, and give the name it has there.

    A module that the root holds under such a name already keeps it, so that two calls of one delegate share it.

    Returns:
        ``lowered_module_0``, ``lowered_module_1``, …

    >>> get_lowered_module_name(torch.nn.Module(), torch.nn.Identity())
    'lowered_module_0'
    """
    index = 0
    while hasattr(root, name := f"lowered_module_{index}"):
        if getattr(root, name) is lowered_module:
            return name
        index += 1
    root.add_module(name, lowered_module)
    return name


def unwrap_immutable(value: Any) -> Any:
    """Turn FX's immutable lists and dicts into ordinary ones, at every depth.

    >>> from torch.fx.immutable_collections import immutable_list
    >>> unwrap_immutable((immutable_list([1, immutable_list([2])]), 3))
    ([1, [2]], 3)
    """
    if isinstance(value, dict):
        return {key: unwrap_immutable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unwrap_immutable(item) for item in value]
    if type(value) is tuple:
        return tuple(unwrap_immutable(item) for item in value)
    return value


# Real values.


@call_delegate.py_impl(DispatchKey.CompositeExplicitAutograd)
def call_delegate_cpu(lowered_module: Any, *args: Any) -> Any:
    """Run the backend's program, on whichever device the values are."""
    inputs = unwrap_immutable(args)
    return without_aliases(lowered_module.run(*inputs), inputs)


# Gradients.


class DelegateFunction(torch.autograd.Function):
    """The delegate in the autograd graph: forward by the backend, backward by its backward or by recomputation."""

    @staticmethod
    def forward(ctx: Any, lowered_module: Any, spec: pytree.TreeSpec, out_specs: list[Any], *leaves: Any) -> Any:
        args = pytree.tree_unflatten(leaves, spec)
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        ctx.surroundings = Surroundings.capture(args, lowered_module.is_random and not is_fake)
        with ctx.surroundings.autocast(), below_autograd():
            outputs, out_spec = pytree.tree_flatten(call_delegate(lowered_module, *args))
        out_specs.append(out_spec)
        ctx.lowered_module, ctx.spec = lowered_module, spec
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out in outputs if _is_discrete(out)))
        # Rule 5: autograd watches the versions of what is saved this way.
        ctx.save_for_backward(*(leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves))
        ctx.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        lowered_module = ctx.lowered_module
        if lowered_module.is_random and get_proxy_mode() is not None:
            raise DelegateError(
                "the backward pass of a delegate that draws random numbers cannot be traced: "
                "a trace would draw them a second time",
                hint="keep the random operators outside of the delegate",
            )
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        leaves = [other if tensor is None else tensor for tensor, other in saved]
        wanted = [index for index in range(len(leaves)) if ctx.needs_input_grad[index + 3]]
        with ctx.surroundings.restored():
            found = lowered_module.gradients(pytree.tree_unflatten(leaves, ctx.spec), grad_outputs, wanted)
        gradients: list[torch.Tensor | None] = [None] * len(leaves)
        for index, gradient in zip(wanted, found, strict=True):
            gradients[index] = gradient
        return (None, None, None, *gradients)


@call_delegate.py_impl(DispatchKey.Autograd)
def call_delegate_autograd(lowered_module: Any, *args: Any) -> Any:
    """Put the call into the autograd graph if an input requires a gradient."""
    leaves, spec = pytree.tree_flatten(args)
    if any(isinstance(leaf, torch.Tensor) and has_tangent(leaf) for leaf in leaves):
        # A backend knows no tangents: the original runs on PyTorch's own engine; counted (Rule 6).
        events.count("eager::call_delegate", site=user_site())
        events.count("eager_because::forward-mode AD")
        return lowered_module.original_module.module()(*unwrap_immutable(args))
    needs_graph = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    if not (needs_graph and torch.is_grad_enabled()):
        with below_autograd():
            return call_delegate(lowered_module, *args)
    out_specs: list[pytree.TreeSpec] = []
    outputs = DelegateFunction.apply(lowered_module, spec, out_specs, *leaves)
    return pytree.tree_unflatten(outputs, out_specs[0])


def _is_discrete(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


# Traces.


def trace_call_delegate(
    proxy_mode: ProxyTorchDispatchMode, func_overload: HigherOrderOperator, lowered_module: Any, *args: Any
) -> Any:
    """Run a call and record it as one node, with the lowered module as an attribute of the traced root."""
    tracer: Any = proxy_mode.tracer
    with disable_proxy_modes_tracing():
        out = func_overload(lowered_module, *args)
    proxies = pytree.tree_map(lambda value: _as_proxy(tracer, value), args)
    get_lowered_module_name(tracer.root, lowered_module)
    out_proxy = tracer.create_proxy("call_function", func_overload, (lowered_module, *proxies), {}, name=OPERATOR_NAME)
    return track_tensor_tree(out, out_proxy, constant=None, tracer=tracer)


def _as_proxy(tracer: Any, value: Any) -> Any:
    proxy = tracer.unwrap_proxy(value)
    if isinstance(proxy, torch.nn.Parameter):
        return torch.fx.Proxy(tracer.create_arg(proxy), tracer)
    return proxy


@call_delegate.py_impl(ProxyTorchDispatchMode)
def call_delegate_proxy_torch_dispatch_mode(mode: ProxyTorchDispatchMode, lowered_module: Any, *args: Any) -> Any:
    """Record the call."""
    return trace_call_delegate(mode, call_delegate, lowered_module, *args)


@register_fake(call_delegate, skip_cache=True)
def call_delegate_fake_tensor_mode(lowered_module: Any, *args: Any) -> Any:
    """Give the shapes of the results: those of the original graph."""
    return lowered_module.original_module.module()(*unwrap_immutable(args))


@call_delegate.py_functionalize_impl
def call_delegate_functionalize(ctx: Any, lowered_module: Any, *args: Any) -> Any:
    """Pass through: a delegate changes nothing and its results are its own."""
    unwrapped = ctx.unwrap_tensors(args)
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(call_delegate(lowered_module, *unwrapped))


# Function transforms.


def _refuse_transform(interpreter: Any, lowered_module: Any, *args: Any) -> Any:
    transform = interpreter.key().name.lower()
    raise DelegateError(
        f"torch.func's {transform} does not go through a delegate of {lowered_module.backend_id!r}",
        hint="torch.autograd.grad for gradients, or the original module under the transform",
    )


for _transform in (TransformType.Grad, TransformType.Jvp, TransformType.Vmap):
    call_delegate.py_impl(_transform)(_refuse_transform)
