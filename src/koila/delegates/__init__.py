"""Stage 6: parts of a program on other backends.

Takes: graphs, or segments of a plan.
Gives: lowered modules, graphs with delegate calls in them, and functions that the execution stage runs.
"""

from koila.delegates.backend import (
    Backend,
    BackendDelegate,
    CompileSpec,
    Delegate,
    DifferentiableBackend,
    Processed,
    Segment,
    available_backends,
    delegate_for,
    get_backend,
    register_backend,
    to_backend,
)
from koila.delegates.call import call_delegate, get_lowered_module_name, is_lowered_module, trace_call_delegate
from koila.delegates.lowered import LoweredBackendModule, LoweredModule
from koila.delegates.partitioner import partition

__all__ = [
    "Backend",
    "BackendDelegate",
    "CompileSpec",
    "Delegate",
    "DifferentiableBackend",
    "LoweredBackendModule",
    "LoweredModule",
    "Processed",
    "Segment",
    "available_backends",
    "call_delegate",
    "delegate_for",
    "get_backend",
    "get_lowered_module_name",
    "is_lowered_module",
    "partition",
    "register_backend",
    "to_backend",
    "trace_call_delegate",
]
