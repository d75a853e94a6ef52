"""koila runs any PyTorch program inside a budget, with the numbers of the whole batch."""

from koila._api import eager, graph, lazy, run, settle
from koila._budget import budget
from koila.capture.eager import EagerTensor
from koila.capture.lazy import LazyTensor
from koila.capture.lookup import lookup_function, lookup_method
from koila.capture.recorder import lazy_forward
from koila.reporting import metrics
