"""Recording: one torch call with lazy operands in, one node and its lazy results out.

*Takes* a function and its arguments. *Gives* lazy results. Inference is asked of the trie first (the program repeats
an earlier one), then of the shape cache, then of fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from koila import events
from koila._torch import finished, saved_tensors_hooks
from koila._torch.dynamo import in_compiled_code
from koila._torch.transforms import active_transform
from koila.capture.bridge import Bridge
from koila.capture.log import count_recorded, same_batch
from koila.capture.pending import recorder
from koila.capture.readers import run_readers
from koila.capture.scan import Scan, scan_call, shape_key, trie_key
from koila.capture.template import template_for
from koila.ir.draws import draw
from koila.ir.graph import collect
from koila.ir.infer import compute_shape, infer, infer_call
from koila.ir.node import Node, Value, function_name, version_of
from koila.ir.numbers import call_numbers, call_structure
from koila.ir.prepass import Inference, Output, is_plain, prepass_of
from koila.ir.replay import Context, current_context
from koila.ir.source import user_site
from koila.ir.tree import leaves, map_leaves
from koila.ir.trie import TrieNode

MAX_DEPTH = 10_000
"""A longer chain of pending calls is cut: its end is run."""


def _inference_for(func: Any, scan: Scan, cacheable: bool, context: Context) -> tuple[Inference, TrieNode | None]:
    """What is known about a call; with its node of the trie if the last program made it, too."""
    log = recorder.log
    if not cacheable:
        log.trie.leave()
        events.count("shape_cache::miss::an argument cannot be hashed")
        return infer(func, scan.args, scan.kwargs, scan.operands), None
    key = trie_key(scan, context, log.epoch)
    found = log.trie.traverse(key, scan.numbers)
    if found is not None:
        return found, log.trie.current
    shape = shape_key(key, scan)
    call = (func, scan.args, scan.kwargs, scan.operands)
    found = compute_shape(shape, lambda: infer_call(call_structure(shape), *call, call_numbers(shape)))
    log.trie.insert(key, found, scan.numbers)
    return found, None


def lazy_forward(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Record one call of a torch function; nothing is computed.

    Args:
        func: The torch function or method.
        args: Its arguments; at least one of them lazy.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns, with lazy tensors in place of tensors.

    >>> import koila
    >>> koila.lazy_forward(torch.add, koila.lazy(torch.ones(2)), 1).run()
    tensor([2., 2.])
    """
    transform = active_transform()
    if transform is not None:
        return run_in_transform(func, args, kwargs, transform)
    if recorder.is_hidden_from_dynamo and in_compiled_code():
        events.count("compiled code is not used: recorded instead", site=user_site())
    scan, cacheable = scan_call(func, args, kwargs)
    if scan.foreign is not None:
        return run_eagerly(func, scan, f"an operand of class {scan.foreign}")
    context = current_context()
    inference, known = _inference_for(func, scan, cacheable, context)
    if inference.forced is not None:
        run_readers([scan.operands[index] for index in inference.writes])
        return run_eagerly(func, scan, inference.forced)
    seen = [i for i in inference.writes if i not in inference.hidden_writes and _is_seen(scan.operands[i])]
    if seen:
        run_readers([scan.operands[index] for index in seen])
        return run_eagerly(func, scan, "a write to a real tensor")
    if saved_tensors_hooks(True) is not None and any(output.prepass.requires_grad for output in inference.outputs):
        return run_eagerly(func, scan, "hooks on saved tensors")
    if not inference.outputs and not inference.writes:
        return inference.structure  # A question that the layout answers.
    first = recorder.log.count
    result = record(func, scan, inference, context, cacheable)
    if known is not None and not known.is_learned:
        log = recorder.log
        log.trie.learn(known, func, template_for(func, scan, inference, context, log.epoch, first))
    return result


def _is_seen(operand: Value | torch.Tensor) -> bool:
    """Whether eager code sees a write to an operand: it is real, or lies in the memory of a real tensor."""
    return not isinstance(operand, Value) or operand.storage.real


def record(func: Any, scan: Scan, inference: Inference, context: Context, cacheable: bool) -> Any:
    """Append a node for the call and wrap its results."""
    node = Node(func, scan.args, scan.kwargs, tuple(scan.operands), inference, context, user_site())
    node.key = (scan.function, context, tuple(scan.statics) if cacheable else object())
    node.slots = tuple(scan.slots)
    node.versions = tuple([version_of(operand) for operand in scan.operands])
    node.draws = [draw(spec) for spec in inference.draws]
    count_recorded(func)
    result = map_outputs(inference.structure, _wrapper(node, scan))
    recorder.log.note(node)
    if node.depth > MAX_DEPTH:
        _cut(node)
    return result


def map_outputs(structure: Any, wrap: Callable[[Output], Any]) -> Any:
    """The result's structure with each `Output` wrapped."""
    if type(structure) is Output:
        return wrap(structure)
    return map_leaves(structure, lambda leaf: wrap(leaf) if type(leaf) is Output else leaf)


def _wrapper(node: Node, scan: Scan) -> Callable[[Output], Any]:
    made: list[Value | None] = []
    log = recorder.log

    def wrap(output: Output) -> Any:
        value = log.make_value(node, output, scan.operands, made)
        if value is None:
            assert output.same_as is not None
            return scan.originals[output.same_as]
        value.position = (log.epoch, log.count)
        log.count += 1
        return Bridge.lazy_type._wrap(value)

    return wrap


def _cut(node: Node) -> None:
    values = [value for index in range(node.num_outputs) if (value := node.output(index)) is not None]
    events.forced("long program", node.site)
    Bridge.realizer.materialize(values, "long program")


def realize(value: Value, why: str) -> torch.Tensor:
    """The real tensor of a value; run if it is pending or has pending writes."""
    if value.real is None or value.storage.writers:
        events.forced(why, user_site())
        Bridge.realizer.materialize([value], why)
    return _data(value)


def _data(value: Value) -> torch.Tensor:
    assert value.real is not None
    return value.real


def real_of(lazy: Any, why: str) -> torch.Tensor:
    """The real tensor of a lazy one."""
    held = lazy._held
    if held is not None:
        return realize(lazy._value, why)
    Bridge.realizer.read(lazy, why)
    return _data(lazy._held)


def run_eagerly(func: Any, scan: Scan, why: str) -> Any:
    """Materialise the operands and make the call on PyTorch's own engine; counted (Rule 6)."""
    name = function_name(func)
    events.count(f"eager::{name}", site=user_site())
    events.count(f"eager_because::{why}")
    recorder.note_eager(name, why)
    operands = [operand for operand in scan.operands if isinstance(operand, Value)]
    budget = budget_of(operands)
    if may_write(func, scan.kwargs):
        run_readers(scan.operands)
    if any(value.real is None or value.storage.writers for value in operands):
        events.forced(why, user_site())
        Bridge.realizer.materialize(operands, why)
    reals = {id(operand): operand.real for operand in operands}
    swap = lambda leaf: reals.get(id(leaf), leaf)  # noqa: E731
    result = func(*map_leaves(scan.args, swap), **map_leaves(scan.kwargs, swap))
    for value in operands:
        assert value.real is not None
        value.prepass = same_batch(value.prepass, prepass_of(value.real))
    back = {id(operand.real): original for operand, original in zip(scan.operands, scan.originals, strict=True)
            if isinstance(operand, Value)}  # fmt: skip

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or any(leaf is original for original in scan.originals):
            return leaf
        if not is_plain(leaf):
            return leaf
        if id(leaf) in back:
            return back[id(leaf)]
        return Bridge.lazy_type._wrap(input_value(finished(leaf), _batch_like(leaf, operands), budget))

    return map_leaves(result, wrap)


def run_in_transform(func: Any, args: Any, kwargs: Any, transform: str) -> Any:
    """Make a call inside of a functional transform, or of a level of forward-mode AD; counted (Rule 6).

    Its results may be tensors of the transform, so they are given as they are; nothing is recorded before it ends.
    """
    events.count(f"eager::{function_name(func)}", site=user_site())
    events.count(f"eager_because::{transform}")
    lazies = [leaf for leaf in leaves((args, kwargs)) if type(leaf) is Bridge.lazy_type]
    values = [lazy._value for lazy in lazies]
    if may_write(func, kwargs):
        run_readers(values)
    reals = {id(lazy): realize(lazy._value, transform) for lazy in lazies}
    swap = lambda leaf: reals.get(id(leaf), leaf)  # noqa: E731
    result = func(*map_leaves(args, swap), **map_leaves(kwargs, swap))
    for value in values:
        assert value.real is not None
        value.prepass = same_batch(value.prepass, prepass_of(value.real))
    back = {id(lazy._value.real): lazy for lazy in lazies}
    return map_leaves(result, lambda leaf: back.get(id(leaf), leaf))


def may_write(func: Any, kwargs: Any) -> bool:
    """Whether the name of a function says that it changes an argument: `add_`, `__iadd__`, `__setitem__`, `out=`."""
    name = str(getattr(func, "__name__", ""))
    return "out" in kwargs or name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))


def _batch_like(result: torch.Tensor, operands: Sequence[Value]) -> int | None:
    """Where the batch of a result may be: a dimension in which it is as long as an operand is in its batch.

    That need not be so. Whatever is computed from the result can be cut there all the same, if the analysis proves it.
    """
    for operand in operands:
        dim = operand.batch
        if dim is not None and result.ndim > dim and result.shape[dim] == operand.prepass.shape[dim]:
            return dim
    return None


def budget_of(values: Sequence[Value]) -> int | None:
    """The byte budget of the programs behind some values: the smallest that their inputs were given."""
    given = [value.budget for value in values if value.budget is not None]
    pending = [value for value in values if value.real is None or value.storage.writers]
    return min([*given, *(collect(pending, []).budgets if pending else [])], default=None)


def input_value(real: torch.Tensor, batch: int | None = None, budget: int | None = None) -> Value:
    """A value that is a real tensor already; a batch dimension that the tensor lacks is none."""
    storage = recorder.place.log.real_storage(real)  # Calls without nodes will find the same one.
    value = Value(prepass_of(real, batch), storage, None, 0)
    value.real = real
    if budget is not None:
        value.budget = budget
    return value
