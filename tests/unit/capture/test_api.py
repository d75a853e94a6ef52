"""run, graph, settle, eager, budget, keep, stream: what they give and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import koila


def test_run_keeps_the_structure_and_runs_once() -> None:
    koila.metrics.reset()
    x = koila.lazy(torch.ones(4))
    found = koila.run({"a": x + 1, "b": [x.sum(), "text"], "c": koila.eager(torch.ones(1))})
    assert found["a"].tolist() == [2.0] * 4 and found["b"][0].item() == 4.0 and found["b"][1] == "text"
    assert all(type(t) is torch.Tensor for t in (found["a"], found["b"][0], found["c"]))
    assert koila.metrics.counter_value("runs") == 1


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_run_gives_a_grad_fn_that_eager_code_can_use(chunk_size: int | None) -> None:
    weight = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    with koila.budget(chunk_size=chunk_size):
        real = koila.run(koila.lazy(torch.ones(5, 3, dtype=torch.float64)) * weight)
        assert type(real) is torch.Tensor and real.grad_fn is not None
        real.square().sum().backward()
    assert weight.grad.tolist() == [20.0] * 3
    assert koila.run(koila.lazy(torch.ones(5, 3)) * weight, detach=True).grad_fn is None


def test_run_takes_anything_that_can_be_run() -> None:
    class Job:
        def __init__(self, result: Any) -> None:
            self.result = result

        def run(self) -> Any:
            return self.result

    weight = torch.ones(2, requires_grad=True)
    found = koila.run([Job(7), {"a": Job(weight * 2)}, koila.lazy(torch.ones(2)) + 1, Job])
    assert found[0] == 7 and found[1]["a"].requires_grad and found[2].tolist() == [2.0, 2.0]
    assert found[3] is Job, "a class is not a job"
    assert not koila.run(Job(weight * 2), detach=True).requires_grad


def test_run_of_real_tensors_gives_them_back() -> None:
    x = torch.ones(2)
    assert koila.run(x) is x


def test_graph_shows_nodes_operands_metas_and_lines() -> None:
    x = koila.lazy(torch.ones(4, 2))
    graph = koila.graph((x @ torch.ones(2, 3)).relu())
    text = str(graph)
    assert text.startswith("graph of 2 nodes, 2 leaves, hash ")
    assert "leaf0: float32[4, 2], batch in dim 0" in text
    assert "relu(%0) -> float32[4, 3]  # " in text and "test_api.py:" in text
    node = graph.nodes[1]
    assert isinstance(node, koila.LazyFunction) and node.shapes == ((4, 3),) and node.num_outputs == 1


def test_graph_as_dot() -> None:
    dot = koila.graph(koila.lazy(torch.ones(4)) + 1).to_dot()
    assert dot.startswith("digraph koila {") and dot.endswith("}")
    assert '"leaf0" -> "%0"' in dot


def test_structural_hashes_compare_programs_not_data() -> None:
    def program(size: int, factor: float) -> int:
        return koila.graph((koila.lazy(torch.randn(4, size)) * factor).sum()).structural_hash

    assert program(2, 1.0) == program(2, 1.0) == program(2, 3.0)
    assert program(2, 1.0) != program(3, 1.0)


def test_settle_performs_pending_writes_to_buffers() -> None:
    norm = nn.BatchNorm1d(3)
    mean = norm.running_mean  # Read from the module later, it would be up to date.
    norm(koila.lazy(torch.randn(8, 3)))
    assert torch.equal(mean, torch.zeros(3))
    koila.settle()
    assert not torch.equal(mean, torch.zeros(3))


def test_buffers_are_updated_once_however_often_the_value_is_read() -> None:
    norm, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    reference(x)
    out = norm(koila.lazy(x))
    koila.run(out)
    koila.run(out.sum())
    koila.settle()
    assert torch.equal(norm.running_var, reference.running_var)
    assert norm.num_batches_tracked == 1


def test_eager_hands_calls_to_the_graph_where_an_operand_is_lazy() -> None:
    a = koila.eager(torch.ones(3))
    assert type(a + 1) is koila.EagerTensor and type(a.run()) is torch.Tensor
    mixed = a + koila.lazy(torch.ones(3))
    assert type(mixed) is koila.LazyTensor and mixed.run().tolist() == [2.0] * 3
    assert a.batch is None
    assert type(koila.eager(koila.lazy(torch.ones(3)) + 1)) is koila.EagerTensor


def test_eager_hands_over_what_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(koila.EagerTensor, "large_bytes", 4096)
    a = koila.eager(torch.ones(64, 1))
    assert type(a * 2) is koila.EagerTensor
    large = a @ a.T
    assert type(large) is koila.LazyTensor and large.sum().item() == 64.0 * 64.0


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_a_chunk_size_must_be_a_whole_number_of_at_least_one(size: Any) -> None:
    with (
        pytest.raises(koila.BudgetError, match="chunk_size must be a whole number of at least 1, got"),
        koila.budget(chunk_size=size),
    ):
        pass


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (0, "leaves nothing to run in"),
        (-5, "leaves nothing to run in|cannot be read"),
        ("many", "cannot be read"),
        (1.5, r"is not a share in \(0, 1\]"),
        (True, "is not a number of bytes"),
        ([1], "is not a number of bytes"),
    ],
)
def test_a_budget_that_is_none_is_refused(allowed: Any, text: str) -> None:
    with pytest.raises(koila.BudgetError, match=text), koila.budget(allowed):
        pass


def test_bytes_and_a_chunk_size_together_are_refused() -> None:
    with pytest.raises(koila.BudgetError, match="both a chunk size"), koila.budget("1GiB", chunk_size=2):
        pass


def test_budgets_nest_and_end() -> None:
    def chunks() -> int:
        koila.metrics.reset()
        (koila.lazy(torch.ones(6, 2)) * 2).sum().item()
        return koila.metrics.counter_value("chunks")

    with koila.budget(chunk_size=3):
        with koila.budget(chunk_size=1):
            assert chunks() == 6
        with pytest.raises(ZeroDivisionError), koila.budget(chunk_size=6):
            raise ZeroDivisionError
        assert chunks() == 2
    assert chunks() == 0


def test_a_budget_decorates() -> None:
    @koila.budget(chunk_size=2)
    def total() -> float:
        return (koila.lazy(torch.ones(6, 2)) * 2).sum().item()

    for _ in range(2):
        koila.metrics.reset()
        assert total() == 24.0
        assert koila.metrics.counter_value("chunks") == 3


def test_stream_gives_the_chunks_in_order() -> None:
    pieces = list(koila.stream(koila.lazy(torch.arange(5.0)) * 2, chunk_size=2))
    assert [piece.tolist() for piece in pieces] == [[0.0, 2.0], [4.0, 6.0], [8.0]]


def test_keep_gives_back_what_it_was_given() -> None:
    x = koila.lazy(torch.ones(3)) + 1
    assert koila.keep(x) is x
    assert koila.keep({"x": x, "n": 2})["x"] is x


def test_an_unknown_operator_runs_whole_and_is_counted() -> None:
    koila.metrics.reset()
    x = torch.randn(6, 4, dtype=torch.float64)
    with koila.budget(chunk_size=2):
        found = koila.run(torch.linalg.matrix_rank(koila.lazy(x) * 2.0))
    assert found.item() == torch.linalg.matrix_rank(x).item()


def test_an_error_of_the_user_comes_from_eager() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        koila.lazy(torch.ones(2, 3)) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    ("function", "name"),
    [(torch.relu, "relu"), (torch.nn.functional.relu, "relu"), (torch.Tensor.relu, "Tensor.relu")],
)
def test_names_of_functions_are_those_that_users_write(function: Any, name: str) -> None:
    assert koila.graph(koila.lazy_forward(function, koila.lazy(torch.ones(2)))).nodes[0].name == name
