"""koila runs any PyTorch program inside a budget, with the numbers of the whole batch.

>>> import torch, koila
>>> x = koila.lazy(torch.ones(4, 2))
>>> (x.sum() / 8).item()
1.0

The names in `__all__` are what users call. Errors are attributes of this module, too (`koila.BudgetError`); their tree
is drawn in `koila.errors`. The parts that koila is made of stand in `koila.parts`, under the names that its documents
give them; some are attributes here as well, for `isinstance` and for annotations.
"""

from koila import _torch as _torch
from koila import errors
from koila._api import eager, explain, graph, keep, last_report, lazy, plan, pure, reports, rule, run, settle, stream
from koila._budget import budget
from koila.capture.eager import EagerTensor as EagerTensor
from koila.capture.lazy import LazyTensor as LazyTensor
from koila.capture.lookup import lookup_function as lookup_function
from koila.capture.lookup import lookup_method as lookup_method
from koila.capture.record import lazy_forward as lazy_forward
from koila.errors import AnalysisError as AnalysisError
from koila.errors import BudgetError as BudgetError
from koila.errors import CaptureError as CaptureError
from koila.errors import DelegateError as DelegateError
from koila.errors import ExecutionError as ExecutionError
from koila.errors import KoilaError as KoilaError
from koila.errors import KoilaWarning as KoilaWarning
from koila.errors import StaleInputError as StaleInputError
from koila.execution.evaluation import Evaluation as Evaluation
from koila.integrations.loader import loader
from koila.interfaces import BatchInfo as BatchInfo
from koila.interfaces import Runnable as Runnable
from koila.interfaces import RunnableTensor as RunnableTensor
from koila.interfaces import TensorMixin as TensorMixin
from koila.ir.node import LazyFunction as LazyFunction
from koila.ir.prepass import PrePass as PrePass
from koila.reporting import metrics
from koila.reporting.planned_run import PlannedRun as PlannedRun
from koila.reporting.progress import progress
from koila.reporting.report import Report as Report
from koila.reporting.report import measure

__version__ = "0.2.0"

__all__ = [
    "budget",
    "eager",
    "errors",
    "explain",
    "graph",
    "keep",
    "last_report",
    "lazy",
    "loader",
    "measure",
    "metrics",
    "plan",
    "progress",
    "pure",
    "reports",
    "rule",
    "run",
    "settle",
    "stream",
]
