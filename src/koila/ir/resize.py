"""Calls at other sizes: what some functions give, from what they gave at two or three sizes.

*Takes* a call without its sizes, the numbers of its operands and arguments, and inferences of the same call at other
sizes. *Gives* the inference of the call at the new size, or None: then PyTorch is to be asked.

Few functions are answered here: those of which every result has sizes that operands have, in dense memory, whatever
these sizes are, and which PyTorch takes long to answer for. A size of a result that was an operand's at every size seen
is so at a new one, if the sizes of the operands still follow from each other as before (`Formulas.values_for`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from koila import events
from koila.ir.cache import Cache
from koila.ir.formulas import Formula, Formulas, NoFormula
from koila.ir.numbers import Number
from koila.ir.prepass import Draw, Inference, Output, PrePass
from koila.ir.samples import after_failure, with_sample
from koila.ir.tree import leaves, map_leaves

_LAYERS = (
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention", "dropout"),
    *("linear", "embedding", "layer_norm", "rms_norm", "softmax", "log_softmax", "cross_entropy", "mse_loss"),
)
_REDUCTIONS = ("mean", "sum", "amax", "all", "any")
_POINTWISE = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "log", "sin"),
    *("cos", "tanh", "sigmoid", "relu", "gelu", "silu", "leaky_relu", "elu", "softplus", "abs", "clamp", "where", "eq"),
    *("ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or"),
    *("logical_not", "masked_fill", "__and__", "__or__", "__xor__", "__eq__", "__rsub__", "__rtruediv__", "__rpow__"),
)
_COMMON = (*_REDUCTIONS, *_POINTWISE)
OPERAND_SIZED = frozenset((*_LAYERS, *_COMMON, *(f"Tensor.{name}" for name in _COMMON)))
"""Functions whose results and random numbers have the sizes of operands."""


class _Resizer:
    """One call at any sizes.

    Raises:
        NoFormula: It did not do the same at all sizes seen, or a size follows from nothing among its operands.
    """

    def __init__(self, samples: Sequence[tuple[tuple[Number, ...], Inference]]) -> None:
        self._formulas = Formulas([numbers for numbers, _ in samples], len(samples[0][0]))
        self._first = samples[0][1]
        rows = zip(*(_prepasses(inference) for _, inference in samples), strict=True)
        self._layouts = [self._layout(row) for row in rows]
        for _, inference in samples[1:]:
            if _with_prepasses(self._first, iter(_prepasses(inference))) != inference:
                raise NoFormula("it does other things at other sizes")

    def _layout(self, row: tuple[PrePass, ...]) -> tuple[PrePass, list[Any]]:
        first = row[0]
        for other in row:
            if len(other.shape) != len(first.shape) or first.with_sizes(other.shape, other.stride) is not other:
                raise NoFormula("results differ in more than sizes")
        columns = zip(*((*prepass.shape, *prepass.stride) for prepass in row), strict=True)
        return first, [self._number(column) for column in columns]

    def _number(self, values: tuple[int, ...]) -> Any:
        if all(value == values[0] for value in values):
            return values[0]
        formula = self._formulas.formula(values)
        if formula is None:
            raise NoFormula("a size of a result follows from no operand")
        return formula

    def at(self, numbers: tuple[Number, ...]) -> Inference:
        """The inference at new sizes."""
        symbols = self._formulas.values_for(numbers)
        return _with_prepasses(self._first, (_sized(first, tree, symbols) for first, tree in self._layouts))


def _sized(first: PrePass, tree: list[Any], symbols: Sequence[Number]) -> PrePass:
    found: tuple[Any, ...] = tuple([number(symbols) if type(number) is Formula else number for number in tree])
    shape, stride = found[: len(first.shape)], found[len(first.shape) :]
    if not _is_dense(shape, stride):
        raise NoFormula("a result does not lie in dense memory")
    return first.with_sizes(shape, stride)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill their memory, in any order of the dimensions."""
    reach = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != reach:
            return False
        reach *= size
    return True


def _prepasses(inference: Inference) -> list[PrePass]:
    """The records in an inference: of its results, then of what it draws."""
    drawn = leaves([(draw.args, draw.kwargs) for draw in inference.draws])
    return [*(output.prepass for output in inference.outputs), *(leaf for leaf in drawn if isinstance(leaf, PrePass))]


def _with_prepasses(inference: Inference, prepasses: Iterator[PrePass]) -> Inference:
    """The same inference with other records."""
    outputs = tuple([replace(output, prepass=next(prepasses)) for output in inference.outputs])
    given = iter(outputs)
    structure = map_leaves(inference.structure, lambda leaf: next(given) if isinstance(leaf, Output) else leaf)
    swap = lambda leaf: next(prepasses) if isinstance(leaf, PrePass) else leaf  # noqa: E731
    draws = tuple([Draw(d.target, map_leaves(d.args, swap), map_leaves(d.kwargs, swap)) for d in inference.draws])
    return replace(inference, structure=structure, outputs=outputs, draws=draws)


class _Known:
    """What is known of one call: inferences at some sizes, and how to make others of them."""

    def __init__(self) -> None:
        self.samples: list[tuple[tuple[Number, ...], Inference]] = []
        self.resizer: _Resizer | None = None

    def add(self, numbers: tuple[Number, ...], inference: Inference) -> None:
        self.samples = with_sample(self.samples, (numbers, inference), lambda each: each[0])
        self.resizer = None
        if len(self.samples) > 1:
            try:
                self.resizer = _Resizer(self.samples)
            except (NoFormula, ValueError):  # Other numbers of them, or other results.
                events.count("sizes::no resizer")
                self.samples = after_failure(self.samples)


_calls: Cache[_Known] = Cache("resize_cache", 512)
"""By call without its sizes, what is known of it."""


def resized(structure: Hashable, numbers: tuple[Number, ...], infer_now: Callable[[], Inference]) -> Inference:
    """The inference of a call of `OPERAND_SIZED`: from other sizes of it, or else as `infer_now` finds it."""
    known = _calls.get(structure) or _Known()
    if known.resizer is not None:
        try:
            found = known.resizer.at(numbers)
            events.count("sizes::resized")
            return found
        except NoFormula:
            pass
    found = infer_now()
    if found.forced is None and not found.writes and not found.reshapes:
        known.add(numbers, found)
        _calls.add(structure, known)
    return found
