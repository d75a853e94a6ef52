"""koila runs any PyTorch program inside a budget, with the numbers of the whole batch.

>>> import torch, koila
>>> x = koila.lazy(torch.ones(4, 2))
>>> (x.sum() / 8).item()
1.0
"""

from koila._api import eager, explain, graph, keep, last_report, lazy, plan, rule, run, settle, stream
from koila._budget import budget
from koila.capture.eager import EagerTensor
from koila.capture.lazy import LazyTensor
from koila.capture.lookup import lookup_function, lookup_method
from koila.capture.record import lazy_forward
from koila.errors import (
    AnalysisError,
    BudgetError,
    CaptureError,
    DelegateError,
    ExecutionError,
    KoilaError,
    StaleInputError,
)
from koila.execution.evaluation import Evaluation
from koila.execution.planned import PlannedRun
from koila.execution.report import Report, measure
from koila.interfaces import BatchInfo, Runnable, RunnableTensor, TensorMixin
from koila.ir.node import LazyFunction
from koila.ir.prepass import PrePass
from koila.reporting import metrics
from koila.reporting.progress import progress

__all__ = [
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
