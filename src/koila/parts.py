"""The parts that koila's five documents name, importable under their names from here.

Users need none of these: what they call stands in `koila.__all__`. Each part is on the way of a real program, or is
reached by the call that its own documentation names; `tests/structure/test_parts.py` sees that.

| document | part | where it lives |
|---|---|---|
| 000, 002 | `EagerTensor`: the eager execution interceptor | `koila.capture.eager` |
| 001, 002 | `LazyTensor` | `koila.capture.lazy` |
| 001 | `lazy_forward` | `koila.capture.record` |
| 001, 003 | `LazyFunction`, also called `Node` | `koila.ir.node` |
| 001 | `lookup_method`, `lookup_function` | `koila.capture.lookup` |
| 001 | `run` | `koila._api` |
| 001 | `Evaluation` | `koila.execution.evaluation` |
| 001, 002 | `PrePass` | `koila.ir.prepass` |
| 001, 002 | `reduce_dims`, `mean` | `koila.analysis.prepasses` |
| 002 | `Runnable`, `TensorMixin`, `RunnableTensor`, `BatchInfo` | `koila.interfaces` |
| 003 | `TrieNode`, `TrieCache` | `koila.ir.trie` |
| 003 | `compute_shape`, `shape_cache` | `koila.ir.infer` |
| 003 | `apply_symbolic_shapes` | `koila.analysis.family` |
| 003 | `Metric` | `koila.events` |
| 004 | `call_delegate`, `trace_call_delegate`, `LoweredModule` | `koila.delegates` |

The GPU memory optimizer of document 002 is not one object: `koila.budget` says what may be used, `koila._free` what is
free (`koila.gpus` has the helpers of koila 0.1), and the planner searches for the largest chunks that fit. What users
of PyTorch's lazy core call stands in `koila.lazy_core`.
"""

from koila._api import run
from koila.analysis.family import apply_symbolic_shapes
from koila.analysis.prepasses import mean, reduce_dims
from koila.capture.eager import EagerTensor
from koila.capture.lazy import LazyTensor
from koila.capture.lookup import lookup_function, lookup_method
from koila.capture.record import lazy_forward
from koila.delegates import LoweredModule, call_delegate, trace_call_delegate
from koila.events import Metric
from koila.execution.evaluation import Evaluation
from koila.interfaces import BatchInfo, Runnable, RunnableTensor, TensorMixin
from koila.ir.infer import compute_shape, shape_cache
from koila.ir.node import LazyFunction, Node
from koila.ir.prepass import PrePass
from koila.ir.trie import TrieCache, TrieNode

__all__ = [
    "BatchInfo",
    "EagerTensor",
    "Evaluation",
    "LazyFunction",
    "LazyTensor",
    "LoweredModule",
    "Metric",
    "Node",
    "PrePass",
    "Runnable",
    "RunnableTensor",
    "TensorMixin",
    "TrieCache",
    "TrieNode",
    "apply_symbolic_shapes",
    "call_delegate",
    "compute_shape",
    "lazy_forward",
    "lookup_function",
    "lookup_method",
    "mean",
    "reduce_dims",
    "run",
    "shape_cache",
    "trace_call_delegate",
]
