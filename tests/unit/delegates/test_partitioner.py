"""Does the partitioner cut out maximal parts, and only what may move?

Takes: small ATen graphs and rules.
Gives: the number and order of the parts, equal values and gradients, refusals.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from koila.delegates import partition, register_backend
from koila.errors import DelegateError
from tests.unit.delegates.helpers import MLP, CountingBackend, PickyBackend, assert_close, double, num_delegate_calls


def children(graph_module: torch.fx.GraphModule) -> list[str]:
    """Give the names of the lowered modules in the order of the calls."""
    return [str(node.target) for node in graph_module.graph.nodes if str(node.target).startswith("lowered_module")]


def without(word: str):  # type: ignore[no-untyped-def]
    """Support every node but those with a word in their name."""
    return lambda node: word not in node.name


class TestParts:
    def test_a_whole_mlp_is_one_part(self) -> None:
        model, x = MLP(), double(5, 4)
        parts = partition(make_fx(model)(x), "eager")
        assert children(parts) == ["lowered_module_0"]
        assert [node.op for node in parts.graph.nodes if node.op == "call_function"] == ["call_function"]
        assert torch.equal(parts(x), model(x))

    def test_gradients_reach_the_shared_parameters(self) -> None:
        model, x = MLP(), double(5, 4)
        parts = partition(make_fx(model)(x), "eager")
        parameters = list(model.parameters())
        actual = torch.autograd.grad(parts(x).square().sum(), parameters)
        assert_close(actual, torch.autograd.grad(model(x).square().sum(), parameters))

    def test_an_unsupported_operator_in_the_middle_gives_two(self) -> None:
        model, x = MLP(), double(5, 4)
        parts = partition(make_fx(model)(x), without("relu"))
        assert children(parts) == ["lowered_module_0", "lowered_module_1"]
        assert num_delegate_calls(parts) == 2
        assert torch.equal(parts(x), model(x))
        actual = torch.autograd.grad(parts(x).square().sum(), list(model.parameters()))
        assert_close(actual, torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    def test_a_part_never_waits_for_itself(self) -> None:
        x = double(3)
        graph_module = make_fx(lambda x: x.sin() + x.sin().cumsum(0).cos())(x)
        parts = partition(graph_module, without("cumsum"))
        parts.graph.lint()
        assert torch.equal(parts(x), graph_module(x))
        assert num_delegate_calls(parts) == 2

    def test_several_outputs_of_a_part(self) -> None:
        x = double(4)

        def program(x: torch.Tensor) -> torch.Tensor:
            first, second = torch.split(x.exp(), 2)
            return first.cumsum(0) + second.sin().cumsum(0)

        parts = partition(make_fx(program)(x), without("cumsum"))
        assert torch.equal(parts(x), program(x))

    def test_a_rule_that_takes_nothing(self) -> None:
        x = double(3)
        graph_module = make_fx(torch.exp)(x)
        parts = partition(graph_module, lambda node: False)
        assert num_delegate_calls(parts) == 0
        assert torch.equal(parts(x), x.exp())

    def test_the_source_is_not_changed(self) -> None:
        x = double(3)
        graph_module = make_fx(torch.exp)(x)
        before = graph_module.code
        partition(graph_module, "eager")
        assert graph_module.code == before and not list(graph_module.children())

    def test_a_backend_may_say_what_it_takes(self) -> None:
        register_backend(PickyBackend())
        model, x = MLP(), double(5, 4)
        parts = partition(make_fx(model)(x), "picky")
        assert num_delegate_calls(parts) == 2
        assert torch.equal(parts(x), model(x))

    def test_a_rule_with_a_backend(self) -> None:
        backend = CountingBackend()
        register_backend(backend)
        x = double(3)
        parts = partition(make_fx(torch.exp)(x), lambda node: True, backend_id="counting")
        parts(x)
        assert backend.num_executed == 1

    def test_an_exported_program_and_its_trace(self) -> None:
        model, x = MLP(), double(5, 4)
        parts = partition(make_fx(model)(x), without("relu"))
        traced = make_fx(parts)(x)
        assert num_delegate_calls(traced) == 2
        assert torch.equal(traced(x), model(x))
        program = torch.export.export(parts, (x,))
        assert num_delegate_calls(program.graph_module) == 2
        assert torch.equal(program.module()(x), model(x))

    def test_meta_survives(self) -> None:
        x = double(3)
        parts = partition(make_fx(torch.exp, tracing_mode="fake")(x), "eager")
        (node,) = [node for node in parts.graph.nodes if node.op == "call_function"]
        assert node.meta["val"].shape == (3,)


class TestWhatMayNotMove:
    def test_random_operators_stay_outside(self) -> None:
        x = double(64)

        def program(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x.exp()).sin()

        parts = partition(make_fx(torch.func.functionalize(program))(x), "eager")
        torch.manual_seed(1)
        expected = program(x)
        torch.manual_seed(1)
        assert torch.equal(parts(x), expected)
        assert any("bernoulli" in node.name for node in parts.graph.nodes)

    def test_a_changed_order_of_random_numbers_is_refused(self) -> None:
        x = double(4)

        def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = torch.rand_like(x.exp())
            return first, torch.rand_like(x).sin()

        with pytest.raises(
            DelegateError, match=r"order in which random numbers are drawn\n  at: rand_like, rand_like_1"
        ):
            partition(make_fx(program)(x), "eager")

    def test_in_place_operators_are_refused(self) -> None:
        x = double(3)
        graph_module = make_fx(lambda x: x.clone().add_(1))(x)
        with pytest.raises(
            DelegateError, match=r"in place \(aten.add_.Tensor\)[^\n]*\n  at: add_.*\n  try: .*functionalize"
        ):
            partition(graph_module, "eager")

    def test_methods_that_change_their_tensor_are_refused(self) -> None:
        with pytest.raises(DelegateError, match=r"in place \(mul_\)"):
            partition(torch.fx.symbolic_trace(lambda x: x.mul_(2)), "eager")

    def test_functions_that_are_not_aten_stay_outside(self) -> None:
        graph_module = torch.fx.symbolic_trace(lambda x: torch.exp(x).sin())
        assert num_delegate_calls(partition(graph_module, "eager")) == 0
