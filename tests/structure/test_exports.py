"""The exported names: a change here is a change that users see, and stands in the changelog."""

from __future__ import annotations

import koila

NAMES = [
    "AnalysisError",
    "BatchInfo",
    "BudgetError",
    "CaptureError",
    "DelegateError",
    "EagerTensor",
    "Evaluation",
    "ExecutionError",
    "KoilaError",
    "LazyFunction",
    "LazyTensor",
    "PlannedRun",
    "PrePass",
    "Report",
    "Runnable",
    "RunnableTensor",
    "StaleInputError",
    "TensorMixin",
    "budget",
    "eager",
    "explain",
    "graph",
    "keep",
    "last_report",
    "lazy",
    "lazy_forward",
    "lookup_function",
    "lookup_method",
    "measure",
    "metrics",
    "plan",
    "progress",
    "rule",
    "run",
    "settle",
    "stream",
]


def test_the_exported_names_are_these() -> None:
    assert koila.__all__ == NAMES


def test_they_are_sorted_and_there() -> None:
    assert sorted(koila.__all__) == koila.__all__
    assert [name for name in koila.__all__ if not hasattr(koila, name)] == []


def test_every_function_and_class_says_what_it_does() -> None:
    assert [name for name in koila.__all__ if not getattr(koila, name).__doc__] == []
