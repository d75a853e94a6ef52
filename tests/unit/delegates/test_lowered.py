"""Is a lowered module an ordinary module: parameters, export, compile, copies?

Takes: lowered modules with parameters.
Gives: comparisons with the modules that they were made of.
"""

import copy
import io
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen

from koila.delegates import LoweredBackendModule, call_delegate, to_backend
from koila.errors import DelegateError
from tests.unit.delegates.helpers import MLP, Around, assert_close, double, lower, num_delegate_calls


def lowered_mlp(model: torch.nn.Module, x: torch.Tensor, source: str) -> LoweredBackendModule:
    """Lower a model that was traced in one of four ways."""
    if source == "export":
        return to_backend("eager", torch.export.export(model, (x,)))
    if source == "unlifted":
        return to_backend("eager", torch.export.export(model, (x,)).module(), (x,))  # type: ignore[arg-type]
    traced = torch.fx.symbolic_trace(model) if source == "symbolic" else make_fx(model)(x)
    return to_backend("eager", traced, (x,))


@pytest.mark.parametrize("source", ["export", "unlifted", "symbolic", "make_fx"])
class TestState:
    def test_forward_and_gradients_of_parameters(self, source: str) -> None:
        model, x = MLP(), double(5, 4, requires_grad=True)
        lowered = lowered_mlp(model, x, source)
        assert set(lowered.parameters()) == set(model.parameters())
        assert torch.equal(lowered(x), model(x))
        parameters = [x, *model.parameters()]
        actual = torch.autograd.grad(lowered(x).square().sum(), parameters)
        assert_close(actual, torch.autograd.grad(model(x).square().sum(), parameters))

    def test_gradients_when_only_parameters_need_them(self, source: str) -> None:
        model, x = MLP(), double(5, 4)
        lowered = lowered_mlp(model, x, source)
        lowered(x).square().sum().backward()
        actual = [parameter.grad for parameter in model.parameters()]
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        assert_close(actual, list(expected))

    def test_an_optimizer_step_is_seen(self, source: str) -> None:
        model, x = MLP(), double(5, 4)
        lowered = lowered_mlp(model, x, source)
        lowered(x).sum().backward()
        torch.optim.SGD(lowered.parameters(), lr=0.1).step()
        assert torch.equal(lowered(x), model(x))

    def test_traces_and_runs_again(self, source: str) -> None:
        model, x = MLP(), double(5, 4)
        around = Around(lowered_mlp(model, x, source))
        traced = make_fx(around)(x)
        assert num_delegate_calls(traced) == 1
        assert torch.equal(traced(x), around(x))

    # PyTorch copies its own tree specs in run_decompositions, and warns of that.
    @pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
    @pytest.mark.parametrize("strict", [False, True])
    def test_exports(self, source: str, strict: bool) -> None:
        model, x = MLP(), double(5, 4)
        around = Around(lowered_mlp(model, x, source))
        program = torch.export.export(around, (x,), strict=strict)
        assert num_delegate_calls(program.graph_module) == 1
        assert torch.equal(program.module()(x), around(x))
        again = program.run_decompositions()
        assert num_delegate_calls(again.graph_module) == 1
        assert torch.equal(again.module()(x), around(x))

    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_compiles_with_gradients(self, source: str, compiler: str) -> None:
        model, x = MLP(), double(5, 4, requires_grad=True)
        around = Around(lowered_mlp(model, x, source))
        torch._dynamo.reset()
        compiled = torch.compile(around, backend=compiler, fullgraph=True)
        parameters = [x, *model.parameters()]
        actual = torch.autograd.grad(compiled(x).square().sum(), parameters)
        assert_close(actual, torch.autograd.grad(around(x).square().sum(), parameters))


class TestFields:
    def test_the_names_that_pytorch_looks_for(self) -> None:
        lowered = lower(torch.exp, double(3))
        assert lowered.backend_id == "eager"
        assert isinstance(lowered.processed_bytes, bytes) and b"aten.exp" in lowered.processed_bytes
        assert lowered.compile_specs == []
        x = double(3)
        assert torch.equal(lowered.original_module.module()(x), x.exp())

    def test_repr(self) -> None:
        assert repr(lower(torch.exp, double(3))) == "LoweredBackendModule(backend_id='eager', inputs=1)"

    def test_structures_of_an_exported_program(self) -> None:
        class Nested(torch.nn.Module):
            def forward(self, pair: list[torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
                return {"sum": (pair[0] + pair[1]) * scale, "first": pair[0].exp()}

        pair = [double(3), double(3)]
        lowered = to_backend("eager", torch.export.export(Nested(), (pair, 2.0)))
        out = lowered(pair, 2.0)
        assert torch.equal(out["sum"], (pair[0] + pair[1]) * 2)
        assert torch.equal(out["first"], pair[0].exp())

    def test_shared_parameters_are_one_input(self) -> None:
        class Tied(MLP):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(self.first(x)) @ self.first.weight

        model, x = Tied(), double(5, 4)
        lowered = to_backend("eager", torch.fx.symbolic_trace(model), (x,))
        assert len(lowered.state_names) == 2
        parameters = list(model.first.parameters())
        actual = torch.autograd.grad(lowered(x).square().sum(), parameters)
        assert_close(actual, torch.autograd.grad(model(x).square().sum(), parameters))

    def test_buffers_move_with_the_module(self) -> None:
        model = torch.nn.BatchNorm1d(4).eval()
        x = torch.randn(5, 4)
        lowered = to_backend("eager", torch.fx.symbolic_trace(torch.nn.Sequential(model)), (x,))
        assert torch.allclose(lowered.double()(x.double()), model.double()(x.double()))


class TestCopies:
    @pytest.mark.parametrize("source", ["export", "symbolic", "make_fx"])
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_run_by_themselves(self, how: str, source: str) -> None:
        model, x = MLP(), double(5, 4)
        lowered = lowered_mlp(model, x, source)
        other = copy.deepcopy(lowered) if how == "deepcopy" else pickle.loads(pickle.dumps(lowered))
        expected = model(x)
        with torch.no_grad():
            model.first.weight.zero_()
        assert torch.equal(other(x), expected)
        assert not torch.equal(lowered(x), expected)

    def test_a_traced_module_can_be_pickled(self) -> None:
        x = double(3)
        lowered = lower(torch.exp, x)
        traced = pickle.loads(pickle.dumps(make_fx(lambda x: lowered(x))(x)))
        assert torch.equal(traced(x), x.exp())

    def test_a_saved_export_has_no_delegate(self) -> None:
        model, x = MLP(), double(5, 4)
        program = torch.export.export(Around(to_backend("eager", torch.export.export(model, (x,)))), (x,))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        # PyTorch writes names only: it must fail here, and not run its own operator in our place.
        with pytest.raises(RuntimeError, match="error when deserializing"):
            torch.export.load(file)


class TestRefusals:
    def test_an_input_that_is_changed(self) -> None:
        x = double(3)
        with pytest.raises(DelegateError, match=r"changes its tensor input 0 .*\n  try: functionalise"):
            lower(lambda x: x.add_(1), x)

    def test_a_value_of_its_own_may_change(self) -> None:
        x = double(3)
        assert torch.equal(lower(lambda x: x.clone().add_(1), x)(x), x + 1)

    def test_running_statistics(self) -> None:
        model, x = torch.nn.BatchNorm1d(4), torch.randn(5, 4)
        model.num_batches_tracked = None
        with pytest.raises(DelegateError, match="running statistics"):
            to_backend("eager", torch.fx.symbolic_trace(torch.nn.Sequential(model)), (x,))

    @pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
    def test_an_export_that_updates_a_buffer(self) -> None:
        model, x = torch.nn.BatchNorm1d(4), torch.randn(5, 4)
        program = torch.export.export(model, (x,))
        with pytest.raises(DelegateError, match="running statistics"):
            to_backend("eager", program)
        with pytest.raises(DelegateError, match=r"updates '\w+' \(BUFFER_MUTATION\)"):
            to_backend("eager", program.run_decompositions())

    def test_what_is_no_graph(self) -> None:
        with pytest.raises(DelegateError, match=r"cannot lower a MLP: a graph is needed\n  try: torch.export"):
            to_backend("eager", MLP(), (double(5, 4),))  # type: ignore[arg-type]

    def test_another_calling_convention(self) -> None:
        x = double(3)
        graph_module = make_fx(torch.exp)(x)
        graph_module.graph.set_codegen(_BoxedCodeGen())
        with pytest.raises(DelegateError, match="with _BoxedCodeGen\n  try: trace it with make_fx"):
            to_backend("eager", graph_module, (x,))

    def test_no_example(self) -> None:
        with pytest.raises(DelegateError, match="needs example arguments"):
            to_backend("eager", make_fx(torch.exp)(double(3)))

    def test_keyword_arguments(self) -> None:
        program = torch.export.export(MLP(), (), {"x": double(5, 4)})
        with pytest.raises(DelegateError, match="1 keyword arguments"):
            to_backend("eager", program)

    def test_what_has_no_shape(self) -> None:
        x = double(3)
        graph_module = torch.fx.symbolic_trace(lambda x: x.numpy())
        with pytest.raises(DelegateError, match="cannot run over fake tensors"):
            to_backend("eager", graph_module, (x,))

    def test_state_left_out(self) -> None:
        model, x = MLP(), double(5, 4)
        lowered = to_backend("eager", make_fx(model)(x), (x,))
        with pytest.raises(DelegateError, match="takes 5 inputs"):
            call_delegate(lowered, x)
