"""Are backends found by name, and do they run segments with their values freed?

Takes: registered backends and small graphs.
Gives: results, lifetimes and error texts.
"""

import subprocess
import sys
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from koila.delegates import (
    CompileSpec,
    Segment,
    available_backends,
    delegate_for,
    get_backend,
    register_backend,
    to_backend,
)
from koila.delegates.backends.eager import FlatProgram
from koila.errors import DelegateError
from tests.unit.delegates.helpers import MLP, CountingBackend, assert_close, double, gradients, layer, lower


class TestRegistry:
    def test_names(self) -> None:
        assert {"eager", "inductor"} <= set(available_backends())
        backend = register_backend(CountingBackend())
        assert get_backend("counting") is backend
        assert "counting" in available_backends()

    def test_unknown(self) -> None:
        with pytest.raises(DelegateError, match=r"no backend 'tpu'; known: eager, inductor.*\n  try: .*register"):
            to_backend("tpu", make_fx(torch.exp)(double(3)), (double(3),))

    def test_taken(self) -> None:
        register_backend(CountingBackend())
        with pytest.raises(DelegateError, match="'counting' is registered already"):
            register_backend(CountingBackend())
        register_backend(CountingBackend(), replace=True)

    def test_the_optional_backend_is_not_loaded_by_import(self) -> None:
        code = "import sys, koila.delegates; print('koila.delegates.backends.inductor' in sys.modules)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "False"

    def test_eager_has_no_options(self) -> None:
        x = double(3)
        with pytest.raises(DelegateError, match="'eager' has no options, got speed"):
            to_backend("eager", make_fx(torch.exp)(x), (x,), [CompileSpec("speed", 1)])


class TestFlatProgram:
    def test_values_die_after_their_last_use(self) -> None:
        alive: list[int] = []
        born: list[weakref.ref[torch.Tensor]] = []

        def watch(x: torch.Tensor) -> torch.Tensor:
            out = x + 1
            alive.append(sum(ref() is not None for ref in born))
            born.append(weakref.ref(out))
            return out

        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        for _ in range(4):
            node = graph.call_function(watch, (node,))
        graph.output(node)
        program = FlatProgram(torch.fx.GraphModule(torch.nn.Module(), graph))
        assert torch.equal(program(torch.zeros(2)), torch.full((2,), 4.0))
        assert alive == [0, 1, 1, 1]

    def test_boxed_inputs_die_after_their_last_use(self) -> None:
        seen: list[bool] = []
        x = torch.ones(3)
        ref = weakref.ref(x)

        def look(value: torch.Tensor) -> torch.Tensor:
            seen.append(ref() is None)
            return value

        graph = torch.fx.Graph()
        first = graph.call_function(torch.exp, (graph.placeholder("x"),))
        graph.output(graph.call_function(look, (first,)))
        box = [x]
        del x
        FlatProgram(torch.fx.GraphModule(torch.nn.Module(), graph)).run_boxed(box)
        assert seen == [True] and box == []


class TestDelegate:
    @pytest.mark.parametrize("backend_id", ["eager", "counting"])
    def test_a_segment_gives_a_tuple(self, backend_id: str) -> None:
        register_backend(CountingBackend())
        x = double(3)
        run = delegate_for(backend_id).lower(make_fx(torch.exp)(x), (x,))
        assert all(map(torch.equal, run(x), (x.exp(),)))

    def test_a_joint_graph(self) -> None:
        args = double(5, 4), double(4, 3, requires_grad=True), double(3, requires_grad=True)
        joint = make_fx(lambda *args: gradients(layer, args))(*args)
        run = delegate_for("eager").lower(joint, args)
        assert_close(list(run(*args)), gradients(layer, args))

    def test_parameters_are_bound(self) -> None:
        model, x = MLP(), double(5, 4)
        run = delegate_for("eager").lower(make_fx(model)(x), (x,))
        assert torch.equal(run(x)[0], model(x))

    def test_boxed(self) -> None:
        x = double(3)
        run = delegate_for("eager").lower(make_fx(torch.exp)(x), (x,))
        assert isinstance(run, Segment)
        box = [x]
        assert torch.equal(run.run_boxed(box)[0], x.exp()) and box == []

    def test_unknown_backend(self) -> None:
        with pytest.raises(DelegateError, match="no backend 'tpu'"):
            delegate_for("tpu")

    def test_wrong_number_of_examples(self) -> None:
        with pytest.raises(DelegateError, match="the segment has 1 inputs, got 0 example values"):
            delegate_for("eager").lower(make_fx(torch.exp)(double(3)), ())


@pytest.mark.slow
class TestInductor:
    def test_forward_and_backward(self) -> None:
        args = double(5, 4), double(4, 3, requires_grad=True), double(3, requires_grad=True)
        lowered = lower(layer, *args, backend_id="inductor")
        assert_close(lowered(*args), layer(*args))
        assert_close(gradients(lowered, args), gradients(layer, args))

    def test_parameters(self) -> None:
        model, x = MLP(), double(5, 4)
        lowered = to_backend("inductor", torch.export.export(model, (x,)))
        actual = torch.autograd.grad(lowered(x).square().sum(), list(model.parameters()))
        assert_close(actual, torch.autograd.grad(model(x).square().sum(), list(model.parameters())))

    def test_random_numbers_of_eager(self) -> None:
        x = double(64, requires_grad=True)

        def dropout(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5)

        lowered = lower(dropout, x, backend_id="inductor")
        results = []
        for function in (lowered, dropout):
            torch.manual_seed(3)
            results.append([function(x), *gradients(function, [x])])
        assert_close(results[0], results[1])

    def test_a_segment(self) -> None:
        x = double(3)
        (out,) = delegate_for("inductor").lower(make_fx(torch.exp)(x), (x,)).run_boxed([x])  # type: ignore[attr-defined]
        assert_close(out, x.exp())

    def test_a_wrong_option(self) -> None:
        x = double(3)
        with pytest.raises(DelegateError, match=r"does not take these options.*warp_speed"):
            to_backend("inductor", make_fx(torch.exp)(x), (x,), [CompileSpec("warp_speed", True)])

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        get_backend("inductor")
        monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
        x = double(3)
        with pytest.raises(DelegateError, match=r"needs a C\+\+ compiler, and none was found\n  try: install g\+\+"):
            to_backend("inductor", make_fx(torch.exp)(x), (x,))
