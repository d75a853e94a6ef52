"""koila runs any PyTorch program inside a budget, with the numbers of the whole batch.

>>> import torch, koila
>>> x = koila.lazy(torch.ones(4, 2))
>>> (x.sum() / 8).item()
1.0

Every day: `lazy`, `budget`, `run`, `plan`, `explain`, `last_report`, explained below, and `metrics.report()`. The
exceptions are attributes of this module (`koila.BudgetError`); `koila.errors` draws their tree.

Now and then (`help(koila.keep)` explains one of them):

    settle      run all that is pending         keep       make a value a result of its run
    stream      a value chunk by chunk          graph      the recorded program
    measure     measure the memory of runs      reports    the last hundred reports
    progress    show phases and chunks          log_to     numbers of runs for TensorBoard
    rule, pure  teach koila an operator or an `autograd.Function` of yours
    loader      a loader with lazy batches      eager      a real tensor that hands calls to the recorder

The parts that koila is made of stand in `koila.parts`, under the names that its documents give them; some are
attributes here as well, for `isinstance` and for annotations.
"""

from koila import _torch as _torch
from koila import errors
from koila import gpus as gpus
from koila._api import eager as eager
from koila._api import explain, last_report, lazy, plan, run
from koila._api import graph as graph
from koila._api import keep as keep
from koila._api import pure as pure
from koila._api import reports as reports
from koila._api import rule as rule
from koila._api import settle as settle
from koila._api import stream as stream
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
from koila.integrations.loader import loader as loader
from koila.interfaces import BatchInfo as BatchInfo
from koila.interfaces import Runnable as Runnable
from koila.interfaces import RunnableTensor as RunnableTensor
from koila.interfaces import TensorMixin as TensorMixin
from koila.ir.node import LazyFunction as LazyFunction
from koila.ir.prepass import PrePass as PrePass
from koila.lazy_core import add_step_closure as add_step_closure
from koila.lazy_core import compile_program as compile_program
from koila.lazy_core import dump_ir as dump_ir
from koila.lazy_core import mark_step as mark_step
from koila.lazy_core import structural_hash as structural_hash
from koila.reporting import metrics
from koila.reporting.planned_run import PlannedRun as PlannedRun
from koila.reporting.progress import progress as progress
from koila.reporting.report import Report as Report
from koila.reporting.report import measure as measure
from koila.reporting.scalars import log_to as log_to

__version__ = "0.2.0"

__all__ = [
    "budget",
    "errors",
    "explain",
    "last_report",
    "lazy",
    "metrics",
    "plan",
    "run",
]
