"""Steps and recorded programs, under the names that PyTorch's lazy core (`torch._lazy`) has for them.

*Takes* lazy tensors. *Gives* their program as text, as a hash that is the same in every process, and as a function of
its inputs; runs what is pending, and what was to be called after that.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from koila._api import graph, lazy, run, settle
from koila.capture.lazy import LazyTensor
from koila.errors import CaptureError
from koila.ir.graph import Graph
from koila.ir.node import Node, Value, function_name
from koila.ir.owned import OwnedCall
from koila.ir.prepass import PrePass, prepass_of
from koila.ir.replay import replay
from koila.ir.source import user_site
from koila.ir.tree import map_leaves

__all__ = [
    "CompiledProgram",
    "add_step_closure",
    "compile_program",
    "dump_ir",
    "mark_step",
    "run_step_closures",
    "structural_hash",
]

# Steps.

_steps = threading.local()
"""What each thread wants to have called after its step."""


def mark_step() -> None:
    """Run everything that this thread has pending, then what `add_step_closure` was given.

    A program needs no such call: a run happens when a value is needed. It is `koila.settle` and the closures.

    >>> total = lazy(torch.ones(3)).sum()
    >>> add_step_closure(print, ("total:", total))
    >>> mark_step()
    total: tensor(3.)
    """
    settle()
    run_step_closures()


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = ()) -> None:
    """Call a function at the end of this step, when lazy tensors among its arguments have been computed.

    Args:
        closure: The function.
        args: Its arguments; lazy tensors in them, in any structure, are passed as real ones.
    """
    if not hasattr(_steps, "closures"):
        _steps.closures = []
    _steps.closures.append((closure, tuple(args)))


def run_step_closures() -> None:
    """Call what is due, in the order in which it was added; each once, even if one of them raises."""
    due, _steps.closures = getattr(_steps, "closures", []), []
    for closure, args in due:
        closure(*run(args))


# Programs as text and as a number.


def dump_ir(value: Any, ir_format: str = "text") -> str:
    """The pending program behind a value, or behind every lazy tensor in a structure, as text.

    Args:
        value: A lazy tensor, or a structure of them.
        ir_format: `text`, with the user's lines, or `dot` for Graphviz.

    Raises:
        CaptureError: There is no such format.

    >>> print(dump_ir(lazy(torch.ones(2)) + 1).splitlines()[-1])
      return %0
    """
    found = graph(value)
    if ir_format not in ("text", "dot"):
        raise CaptureError(
            f"ir_format={ir_format!r} is neither 'text' nor 'dot'",
            where=str(user_site()),
            hint='koila.dump_ir(value, "text")',
        )
    return str(found) if ir_format == "text" else found.to_dot()


def structural_hash(value: Any) -> str:
    """A text that two programs share if they make the same calls on tensors of the same layout, in any process.

    Data and Python numbers that may vary from step to step do not count; sizes, types, batch dimensions and the modes
    of PyTorch do. A module or function of the user's counts by its name.

    >>> first, second = (structural_hash(lazy(torch.rand(3, 2)) * 2) for _ in range(2))
    >>> first == second, first == structural_hash(lazy(torch.rand(4, 2)) * 2)
    (True, False)
    """
    found = graph(value)
    calls, metas, *rest = found.key
    texts = [_text((metas, rest))]
    for (key, operands), node in zip(calls, found.nodes, strict=True):
        _, context, *statics = key
        texts.append(f"{_function(node.func)}{_text((context, statics, operands))}")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def _function(func: Any) -> str:
    owner = func.owner if isinstance(func, OwnedCall) else func
    kind = owner if hasattr(owner, "__qualname__") else type(owner)
    return f"{getattr(kind, '__module__', '')}.{function_name(func)}"


def _text(part: Any) -> str:
    """A part of a program's key as text without addresses: the same in every process."""
    if isinstance(part, PrePass):
        return _text(part.as_tuple())
    if isinstance(part, torch.Stream):  # Which stream a call runs on is a matter of its process.
        return _text(None)
    if isinstance(part, (tuple, list)):
        return f"({','.join(map(_text, part))})"
    if isinstance(part, dict):
        return _text(sorted((str(name), _text(member)) for name, member in part.items()))
    if isinstance(part, (set, frozenset)):
        return _text(sorted(map(_text, part)))
    if is_dataclass(part) and not isinstance(part, type):
        return _text([getattr(part, field.name) for field in fields(part)])
    if isinstance(part, type) or callable(part):
        return f"{getattr(part, '__module__', '')}.{getattr(part, '__qualname__', type(part).__qualname__)}"
    text = repr(part)
    return text if " at 0x" not in text else type(part).__qualname__


# Programs as functions.


class CompiledProgram:
    """A recorded program as a function of its inputs; see `compile_program`."""

    def __init__(self, value: Any, inputs: Sequence[LazyTensor] | None) -> None:
        self._result = map_leaves(value, lambda leaf: leaf._value if type(leaf) is LazyTensor else leaf)
        self._graph: Graph = graph(value)
        read = list(_inputs_of(self._graph))
        self._inputs = read if inputs is None else [tensor._value for tensor in inputs]
        missing = set(read) - set(self._inputs)
        if missing:
            shapes = ", ".join(sorted(str(list(each.prepass.shape)) for each in missing))
            _refuse(f"the program also reads {shapes}", "name every lazy input: koila.compile_program(loss, (x, y))")
        self.hash = structural_hash(value)
        """The program's `structural_hash`."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs, in the order in which they are to be given."""
        return [value.prepass.shape for value in self._inputs]

    def __call__(self, *tensors: torch.Tensor, budget: object = None) -> Any:
        """Run the program on other tensors.

        Args:
            tensors: One for each input, with its shape, dtype and device.
            budget: What the run may allocate, as in `koila.lazy`.

        Returns:
            What the program was compiled from, with real tensors; random numbers are drawn anew.

        Raises:
            CaptureError: The tensors are not like the inputs.
        """
        self._check(tensors)
        pairs = zip(self._inputs, tensors, strict=True)
        environment = {value: lazy(tensor, batch=value.batch, budget=budget) for value, tensor in pairs}
        lookup = lambda leaf: self._stand_in(leaf, environment)  # noqa: E731
        replay(self._graph.nodes, environment, lambda node: lookup, _no_numbers)
        return run(map_leaves(self._result, lookup))

    def _stand_in(self, leaf: Any, environment: dict[Value, Any]) -> Any:
        """What stands for an argument: an input, a value that was computed, or a tensor as it is now."""
        if not isinstance(leaf, Value):
            return leaf
        return environment.get(leaf, leaf.real)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != len(self._inputs):
            _refuse(f"the program has {len(self._inputs)} inputs, got {len(tensors)}", f"their shapes: {self.shapes}")
        for number, (tensor, value) in enumerate(zip(tensors, self._inputs, strict=True)):
            found, expected = prepass_of(tensor) if isinstance(tensor, torch.Tensor) else None, value.prepass
            like = lambda each: (each.shape, each.dtype, each.device)  # noqa: E731
            if found is None or like(found) != like(expected):
                shown = type(tensor).__name__ if found is None else repr(found)
                _refuse(f"input {number} is {expected!r}, got {shown}", "compile the program again for another shape")


def compile_program(value: Any, inputs: Sequence[LazyTensor] | None = None) -> CompiledProgram:
    """Make a function of the pending program behind a value: inputs in, results out, as often as wanted.

    Parameters and other real tensors are read as they are at each call, and running statistics are updated. Python code
    is not run again: what it decided while the program was recorded stays so, and what it did to real tensors beside
    the program (BatchNorm counts its batches) is not done again.

    Args:
        value: A lazy tensor, or a structure of them; it stays pending.
        inputs: The lazy tensors to be given at each call, in this order; all that the program reads, in the order in
            which it reads them, if they are not named.

    Returns:
        A `CompiledProgram`: call it.

    Raises:
        CaptureError: The program reads lazy tensors that are not among the inputs.

    >>> x = lazy(torch.ones(3))
    >>> double = compile_program(x * 2)
    >>> double(torch.arange(3.0))
    tensor([0., 2., 4.])
    """
    return CompiledProgram(value, inputs)


def _inputs_of(program: Graph) -> Iterator[Value]:
    """Values that the program reads and does not compute, each once, in the order of their first use."""
    operands = (operand for node in program.nodes for operand in node.operands)
    found = (operand for operand in operands if isinstance(operand, Value) and operand not in program.produced)
    yield from dict.fromkeys((*found, *(value for value in program.outputs if value not in program.produced)))


def _no_numbers(node: Node) -> Sequence[torch.Tensor]:
    """Random numbers are drawn by the call itself."""
    return ()


def _refuse(fact: str, hint: str) -> None:
    raise CaptureError(fact, where=str(user_site()), hint=hint)
