"""Results written over operands: the same numbers, no memory of their own, and never over what somebody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

import koila
from benchmarks.witness import Watch, call_outside
from koila.planning.in_place import _IN_PLACE, Variant, variant_of

aten = torch.ops.aten
LARGE = (64, 128)


def operators() -> Iterator[tuple[OpOverload, Variant]]:
    """Every operator of the dispatcher that has such a form."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        target = getattr(getattr(aten, packet, None), overload or "default", None) if namespace == "aten" else None
        variant = None if target is None else variant_of(target)
        if variant is not None:
            yield target, variant


def arguments(target: OpOverload, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by the schema's types: tensors of one shape and dtype, masks where a mask is asked for."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value: Any = torch.rand(shape) * 0.8 + 0.1
            is_mask = "mask" in argument.name or argument.name == "condition"
            value = value > 0.5 if is_mask or dtype is torch.bool else (value * 10).to(dtype) + (dtype == torch.int64)
        elif kind == "Optional[number]" or kind == "Optional[Tensor]":
            value = 2 if kind == "Optional[number]" else None
        elif argument.has_default_value():
            value = argument.default_value
        else:
            value = {"number": 2, "float": 0.5, "int": 1, "bool": False}.get(kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def written(variant: Variant, place: int, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The result in the memory of one operand."""
    out = {} if variant.out is None else {variant.out: args[place]}
    return variant.target(*args, **kwargs, **out)


def places(variant: Variant, args: list[Any], result: torch.Tensor) -> list[int]:
    """Operands with the layout of the result."""
    found = [n for n, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype == result.dtype]
    return [n for n in found if args[n].shape == result.shape and (variant.out is not None or n == 0)]


def trial(target: OpOverload, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[list[Any], dict[str, Any], Any]:
    args, kwargs = arguments(target, dtype, shape)
    try:
        return args, kwargs, target(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError, IndexError):
        return args, kwargs, None


def test_every_form_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    tried: set[OpOverload] = set()
    for target, variant in operators():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
            args, kwargs, expected = trial(target, dtype, (5, 7))
            for place in places(variant, args, expected) if isinstance(expected, torch.Tensor) else ():
                own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                found = written(variant, place, own, kwargs)
                assert found.data_ptr() == own[place].data_ptr(), target
                assert torch.equal(found.nan_to_num(), expected.nan_to_num()), f"{target}, operand {place}, {dtype}"
                tried.add(target)
    assert len(tried) > 150
    known = {aten.gelu_backward.default, aten.threshold_backward.default, aten.mul.Tensor, aten.where.self}
    assert known <= tried


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize("width", [1, 5, 64, 1031])
def test_softmaxes_over_contiguous_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    for name in ("_softmax", "_log_softmax"):
        forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward_data").default
        expected = forward(x, -1, False)
        variant = variant_of(forward)
        assert variant is not None
        assert torch.equal(written(variant, 0, [x.clone(), -1, False], {}), expected)
        variant, wanted = variant_of(backward), backward(gradient, expected, 1, dtype)
        assert variant is not None
        for place in (0, 1):
            operands = [gradient.clone(), expected.clone(), 1, dtype]
            assert torch.equal(written(variant, place, operands, {}), wanted)


def test_parts_that_are_changed_in_place() -> None:
    torch.manual_seed(0)
    x, index, rows = torch.randn(5, 7), torch.randint(0, 5, (3, 7)), torch.tensor([4, 0, 2])
    calls: list[tuple[OpOverload, list[Any]]] = [
        (aten.scatter.src, [0, index[:1], torch.randn(3, 7)]),
        (aten.scatter.value, [0, index, 2.0]),
        (aten.scatter_add.default, [0, index, torch.randn(3, 7)]),
        (aten.index_add.default, [0, rows, torch.randn(3, 7)]),
        (aten.index_put.default, [[rows], torch.randn(3, 7), True]),
        (aten.masked_fill.Tensor, [x > 0, torch.tensor(2.0)]),
    ]
    assert {target for target, _ in calls} == set(_IN_PLACE)
    for target, rest in calls:
        variant, own = variant_of(target), x.clone()
        assert variant is not None and variant.out is None
        assert torch.equal(written(variant, 0, [own, *rest], {}), target(x, *rest))
        assert not torch.equal(own, x)


def bytes_of_forms() -> dict[str, int]:
    """What each form allocates on tensors of 32 KiB; runs under the hook."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, int] = {}
    for target, variant in operators():
        args, kwargs, expected = trial(target, torch.float32, LARGE)
        for place in places(variant, args, expected) if isinstance(expected, torch.Tensor) else ():
            own, again = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
            written(variant, place, own, kwargs)
            with Watch() as watch:
                written(variant, place, again, kwargs)
            found[str(target)] = max(watch.peak_bytes, found.get(str(target), 0))
    return found


def test_no_form_allocates_a_result() -> None:
    found = call_outside("tests.unit.planning.test_in_place:bytes_of_forms")
    assert len(found) > 100
    assert {name: size for name, size in found.items() if size >= 32 * 1024} == {}


Step = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


def everything_is_a_result(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a = x @ w
    b = a + 1
    c = b.exp()
    return [b, c, (c * 2).sum(), (b * c).sigmoid()]


def views_are_read_later(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a = (x @ w) * 2
    turned, part, flat = a.t(), a[:, 1:3], a.reshape(-1)
    b = a.exp()
    return [b.sum(1), (turned * 3).sum(0), part.sin().sum(1), (flat.cos() * b.reshape(-1)).sum()]


def twice_in_one_call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a = (x @ w).tanh()
    square = a[:, :3].unsqueeze(2) * a[:, :3].unsqueeze(1)
    return [(a * a).sum(1), (square + square.transpose(1, 2)).sum(), a + a]


def sums_and_gradients(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a = torch.nn.functional.gelu(x @ w)
    total = a.sum(0)
    return [total + 1, (a * total).sum(1), total.exp().sum(), a.softmax(-1)]


def conjugates(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a = torch.complex(x @ w, x @ w.cos()).exp()
    b = a.conj() * 2
    return [b.real.sum(1), (b.imag * b.real).tanh(), (a * a.conj()).real.sum()]


def test_results_are_no_views() -> None:
    x, w = torch.randn(7, 4), torch.randn(4, 6)
    with koila.budget(chunk_size=2):
        total = (koila.lazy(x) @ w).sum(0) + 1
        found = koila.run(total.view(2, 3).exp().tanh())
    torch.testing.assert_close(found, ((x @ w).sum(0) + 1).view(2, 3).exp().tanh())
    assert not found._is_view()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(
    "step",
    [everything_is_a_result, views_are_read_later, twice_in_one_call, sums_and_gradients, conjugates],
    ids=lambda f: f.__name__,
)
def test_what_is_read_later_stays(step: Step, size: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    before, expected = x.clone(), step(x, w)
    (gradient,) = torch.autograd.grad([value.sum() for value in expected], [w])
    with koila.budget(chunk_size=size):
        found = step(koila.lazy(x), w)
        loss = sum(value.sum() for value in found)
        loss.backward()
        values = [koila.run(value) for value in found]
    torch.testing.assert_close(w.grad, gradient)
    for own, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(own, theirs)
    assert torch.equal(x, before)
