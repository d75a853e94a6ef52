"""Does `call_delegate` give the values and gradients of the original, under every key and mode?

Takes: small lowered functions in float64.
Gives: comparisons with the same functions run eagerly.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils._python_dispatch import TorchDispatchMode

from koila.delegates import (
    LoweredBackendModule,
    LoweredModule,
    call_delegate,
    get_lowered_module_name,
    is_lowered_module,
    register_backend,
    to_backend,
)
from koila.delegates.call import unwrap_immutable
from koila.errors import DelegateError
from tests.unit.delegates.helpers import (
    BackwardBackend,
    CountingBackend,
    assert_close,
    double,
    gradients,
    layer,
    lower,
    num_delegate_calls,
)


def scaled_cat(tensors: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Take a list and a number."""
    return torch.cat(tensors) * scale


class TestValues:
    def test_equals_the_original_bit_for_bit(self) -> None:
        args = double(5, 4), double(4, 3), double(3)
        assert torch.equal(lower(layer, *args)(*args), layer(*args))

    def test_runs_the_backend_and_not_the_original(self) -> None:
        backend = register_backend(CountingBackend())
        x = double(3)
        lower(torch.exp, x, backend_id="counting")(x)
        assert backend.num_executed == 1  # type: ignore[attr-defined]

    def test_several_outputs_keep_their_structure(self) -> None:
        x = double(3)
        lowered = lower(lambda x: {"a": x.exp(), "b": [x.sin(), x.argmax()]}, x)
        out = lowered(x)
        assert torch.equal(out["a"], x.exp())
        assert torch.equal(out["b"][1], x.argmax())

    def test_results_never_share_memory(self) -> None:
        x = double(4)
        view, again = lower(lambda x: (x.view(2, 2), x.view(4)), x)(x)
        assert len({x.data_ptr(), view.data_ptr(), again.data_ptr()}) == 3

    def test_refuses_a_module_that_is_not_lowered(self) -> None:
        with pytest.raises(DelegateError, match=r"must be a LoweredBackendModule, got Linear\n  try: .*to_backend"):
            call_delegate(torch.nn.Linear(1, 1), double(1))

    def test_refuses_a_wrong_number_of_inputs(self) -> None:
        x = double(3)
        with pytest.raises(DelegateError, match="takes 1 inputs, got 2"):
            call_delegate(lower(torch.exp, x), x, x)


class TestGradients:
    @pytest.mark.parametrize("needing", [(True, True, True), (True, False, False), (False, True, False)])
    def test_equal_eager_for_the_inputs_that_need_one(self, needing: tuple[bool, ...]) -> None:
        args = [
            double(*shape).requires_grad_(need) for shape, need in zip([(5, 4), (4, 3), (3,)], needing, strict=True)
        ]
        assert_close(gradients(lower(layer, *args), args), gradients(layer, args))

    def test_no_graph_when_nothing_needs_it(self) -> None:
        x = double(3)
        lowered = lower(torch.exp, x)
        assert lowered(x).grad_fn is None
        with torch.no_grad():
            assert lowered(x.requires_grad_()).grad_fn is None

    def test_through_lists_and_beside_numbers(self) -> None:
        graph_module = torch.fx.symbolic_trace(scaled_cat)
        first, second = double(2, requires_grad=True), double(3)
        lowered = to_backend("eager", graph_module, ([first, second], 3.0))
        out = lowered([first, second], 3.0)
        assert torch.equal(out, scaled_cat([first, second], 3.0))
        (gradient,) = torch.autograd.grad(out.sum(), [first])
        assert torch.equal(gradient, torch.full((2,), 3.0, dtype=torch.float64))

    def test_an_unused_input_and_a_discrete_output(self) -> None:
        x, y = double(3, requires_grad=True), double(3, requires_grad=True)
        values, index = lower(lambda x, y: (x.square(), x.argmax()), x, y)(x, y)
        assert not index.requires_grad
        grad_x, grad_y = torch.autograd.grad(values.sum(), [x, y], allow_unused=True)
        assert_close(grad_x, 2 * x.detach())
        assert grad_y is None

    def test_one_of_two_outputs_used(self) -> None:
        x = double(3, requires_grad=True)
        _, second = lower(lambda x: (x.exp(), x.sin()), x)(x)
        assert_close(torch.autograd.grad(second.sum(), x)[0], x.detach().cos())

    def test_first_and_second_derivative(self) -> None:
        args = tuple(double(*shape, requires_grad=True) for shape in [(2, 4), (4, 3), (3,)])
        lowered = lower(layer, *args)
        assert torch.autograd.gradcheck(lowered, args)
        assert torch.autograd.gradgradcheck(lowered, args)

    def test_backward_of_the_backend_is_used(self) -> None:
        backend = BackwardBackend()
        register_backend(backend)
        args = double(5, 4), double(4, 3, requires_grad=True), double(3)
        lowered = lower(layer, *args, backend_id="backward")
        assert_close(gradients(lowered, args), gradients(layer, args))
        assert (backend.num_executed, backend.num_backward) == (1, 1)

    def test_second_derivative_does_not_use_it(self) -> None:
        backend = BackwardBackend()
        register_backend(backend)
        x = double(3, requires_grad=True)
        lowered = lower(torch.exp, x, backend_id="backward")
        (first,) = torch.autograd.grad(lowered(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert_close(second, x.detach().exp())
        assert backend.num_backward == 0

    def test_random_numbers_are_those_of_the_forward_pass(self) -> None:
        x = double(64, requires_grad=True)

        def dropout(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x * x, 0.5)

        lowered = lower(dropout, x)
        assert lowered.is_random
        torch.manual_seed(7)
        expected = gradients(dropout, [x])
        expected_state = torch.get_rng_state()
        torch.manual_seed(7)
        out = lowered(x)
        torch.rand(3)
        weights = torch.arange(1.0, 65, dtype=torch.float64)
        state = torch.get_rng_state()
        (actual,) = torch.autograd.grad((out * weights).sum(), x)
        assert_close([actual], expected)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(7)
        lowered(x)
        assert torch.equal(torch.get_rng_state(), expected_state)

    def test_autocast_of_the_forward_pass(self) -> None:
        x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        lowered = lower(torch.mm, x, weight)
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = lowered(x, weight), torch.mm(x, weight)
        assert out.dtype == torch.bfloat16
        actual = torch.autograd.grad(out.sum(), [x, weight])
        assert all(map(torch.equal, actual, torch.autograd.grad(expected.sum(), [x, weight])))

    def test_a_changed_input_is_an_error(self) -> None:
        x = double(3, requires_grad=True)
        y = x * 1
        out = lower(torch.exp, x)(y)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class TestTraces:
    def test_one_node_that_runs_again(self) -> None:
        x = double(3)
        lowered = lower(lambda x: x.exp().sin(), x)
        traced = make_fx(lambda x: lowered(x * 2) + 1)(x)
        assert num_delegate_calls(traced) == 1
        assert "lowered_module_0" in traced.code and "executorch_call_delegate" in traced.code
        other = double(3)
        assert torch.equal(traced(other), (other * 2).exp().sin() + 1)

    @pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
    def test_every_tracing_mode(self, tracing_mode: str) -> None:
        x = double(3)
        lowered = lower(torch.exp, x)
        traced = make_fx(lambda x: lowered(x), tracing_mode=tracing_mode)(x)
        assert num_delegate_calls(traced) == 1
        assert torch.equal(traced(x), x.exp())

    def test_names(self) -> None:
        x = double(3)
        one, two = lower(torch.exp, x), lower(torch.sin, x)
        traced = make_fx(lambda x: one(two(one(x))))(x)
        assert [name for name, _ in traced.named_children()] == ["lowered_module_0", "lowered_module_1"]
        assert traced.lowered_module_0 is one and traced.lowered_module_1 is two
        root = torch.nn.Module()
        assert [get_lowered_module_name(root, module) for module in (one, two, one)] == [
            "lowered_module_0",
            "lowered_module_1",
            "lowered_module_0",
        ]

    def test_forward_and_backward_jointly(self) -> None:
        args = double(5, 4), double(4, 3, requires_grad=True), double(3, requires_grad=True)
        lowered = lower(layer, *args)
        traced = make_fx(lambda *args: gradients(lowered, args))(*args)
        assert num_delegate_calls(traced) == 1
        assert_close(traced(*args), gradients(layer, args))

    def test_random_backward_cannot_be_traced(self) -> None:
        x = double(3, requires_grad=True)
        lowered = lower(lambda x: torch.nn.functional.dropout(x), x)
        with pytest.raises(DelegateError, match="draws random numbers cannot be traced"):
            make_fx(lambda x: gradients(lowered, [x]))(x)

    def test_a_traced_module_prints_this_operator_and_not_pytorchs(self) -> None:
        x = double(3)
        lowered = lower(torch.exp, x)
        traced = make_fx(lambda x: lowered(x))(x)
        assert "torch.ops.higher_order" not in traced.code
        assert torch.ops.higher_order.executorch_call_delegate is not call_delegate
        assert torch._ops._higher_order_ops["executorch_call_delegate"] is not call_delegate


class TestModes:
    def test_fake_tensors_have_shapes(self) -> None:
        args = double(5, 4), double(4, 3), double(3)
        lowered = lower(layer, *args)
        with FakeTensorMode() as mode:
            out = lowered(*map(mode.from_tensor, args))
        assert isinstance(out, FakeTensor) and out.shape == (5, 3) and out.dtype == torch.float64

    def test_fake_tensors_without_their_mode_in_nested_lists(self) -> None:
        graph_module = torch.fx.symbolic_trace(lambda nested: torch.cat(nested[0]))
        x = double(2)
        lowered = to_backend("eager", graph_module, ([[x, x]],))
        fake = FakeTensorMode().from_tensor(x)
        assert lowered([[fake, fake]]).shape == (4,)

    def test_fake_gradient(self) -> None:
        lowered = lower(torch.exp, double(3))
        with FakeTensorMode():
            x = torch.randn(3, dtype=torch.float64, requires_grad=True)
            lowered(x).sum().backward()
        assert isinstance(x.grad, FakeTensor)

    def test_functionalize(self) -> None:
        x = double(3)
        lowered = lower(torch.exp, x)

        def program(x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y.add_(1)
            return lowered(y)

        assert torch.equal(torch.func.functionalize(program)(x), (x + 1).exp())
        traced = make_fx(torch.func.functionalize(program))(x)
        assert num_delegate_calls(traced) == 1
        assert "add_" not in traced.code
        assert torch.equal(traced(x), (x + 1).exp())

    def test_other_modes_see_the_operators_inside(self) -> None:
        class Recorder(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))

        x = double(3)
        lowered = lower(torch.exp, x)
        with Recorder() as recorder:
            lowered(x)
        assert recorder.names == ["aten.exp.default"]

    @pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
    def test_function_transforms_are_refused(self, transform) -> None:  # type: ignore[no-untyped-def]
        x = double(3)
        lowered = lower(lambda x: x.exp().sum(), x)
        with pytest.raises(DelegateError, match=f"{transform.__name__} does not go through a delegate of 'eager'"):
            transform(lowered)(x)


class TestSmallParts:
    def test_is_lowered_module_goes_by_name(self) -> None:
        namesake = type("LoweredBackendModule", (), {})
        assert is_lowered_module(lower(torch.exp, double(1)))
        assert is_lowered_module(namesake())
        assert not is_lowered_module(torch.nn.Identity())
        assert LoweredModule is LoweredBackendModule

    def test_immutable_collections_are_unwrapped_at_every_depth(self) -> None:
        value = (immutable_list([1, immutable_dict({"a": immutable_list([2])})]), (immutable_list(),))
        plain = unwrap_immutable(value)
        assert plain == ([1, {"a": [2]}], ([],))
        assert type(plain[0]) is list and type(plain[0][1]) is dict and type(plain[0][1]["a"]) is list
        assert type(plain[1][0]) is list

    def test_the_backend_gets_ordinary_lists(self) -> None:
        seen: list[type] = []

        class Looking(CountingBackend):
            def execute(self, processed, *args):  # type: ignore[no-untyped-def]
                seen.append(type(args[0]))
                return super().execute(processed, *args)

        register_backend(Looking())
        x = double(2)
        lowered = to_backend("counting", torch.fx.symbolic_trace(scaled_cat), ([x, x], 2.0))
        call_delegate(lowered, immutable_list([x, x]), 2.0)
        assert seen == [list]
