"""What delegates use of PyTorch although it is not public API: higher-order operators, code of graphs, trees.

Takes: PyTorch. Gives: names as in `koila._torch`, apart from it because these modules are slow to import.
`CallDelegate` also overrides `HigherOrderOperator._get_overloaded_args`. Look at: torch/_ops.py.
"""

import torch
import torch._guards
import torch._higher_order_ops.utils
import torch._ops
import torch.fx.experimental.proxy_tensor
import torch.fx.experimental.symbolic_shapes
import torch.fx.graph
import torch.fx.passes.infra.partitioner
import torch.fx.passes.operator_support
import torch.utils._python_dispatch
import torch.utils._pytree

pytree = torch.utils._pytree
"""Nested arguments, flat and back, as export has them. Look at: torch/utils/_pytree.py, `torch.utils.pytree`."""

# The operator.

DispatchKey = torch._C.DispatchKey
"""The places where `call_delegate` has a rule of its own. Look at: c10/core/DispatchKey.h."""
TransformType = torch._C._functorch.TransformType
"""The transforms of functorch, for which there are rules, too. Look at: torch/csrc/functorch/init.cpp."""
HigherOrderOperator = torch._ops.HigherOrderOperator
"""An operator whose argument is a module. Look at: torch/_ops.py."""
higher_order_operators = torch._ops._higher_order_ops
"""PyTorch's table of them: its own delegate call must stay there. Look at: torch/_ops.py."""
register_fake = torch._higher_order_ops.utils.register_fake
"""The rule on fake tensors. Look at: torch/_higher_order_ops/utils.py."""
dispatch_keys = torch._C._dispatch_keys
"""Whether a nested argument has a Python rule of its own. Look at: torch/csrc/utils/python_dispatch.cpp."""
below_autograd = torch._C._AutoDispatchBelowAutograd
"""The kernel under the autograd rule. Look at: torch/_higher_order_ops/utils.py."""
current_mode = torch.utils._python_dispatch._get_current_dispatch_mode
"""The mode that would see the call. Look at: torch/utils/_python_dispatch.py."""

# Traces.

ProxyTorchDispatchMode = torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode
"""The mode that writes a call into a trace. Look at: torch/fx/experimental/proxy_tensor.py."""
disable_proxy_modes_tracing = torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing
"""Shapes of a call are found outside of the trace. Look at: torch/fx/experimental/proxy_tensor.py."""
track_tensor_tree = torch.fx.experimental.proxy_tensor.track_tensor_tree
"""Joins results to their node in a trace. Look at: torch/fx/experimental/proxy_tensor.py."""
detect_fake_mode = torch._guards.detect_fake_mode
"""The mode of given fake tensors. Look at: torch/_guards.py."""
ShapeEnv = torch.fx.experimental.symbolic_shapes.ShapeEnv
"""Symbolic sizes of a backend's graph. Look at: torch/fx/experimental/symbolic_shapes.py."""

# Graphs and their memory.

PyTreeCodeGen = torch.fx.graph._PyTreeCodeGen
"""The code of a graph module that takes and gives trees. Look at: torch/fx/graph.py."""
BoxedCodeGen = torch.fx.graph._BoxedCodeGen
"""The code of a graph that frees its arguments. Look at: torch/fx/graph.py."""
has_storage = torch._C._has_storage
"""Tensors of other layouts have none. Look at: torch/csrc/autograd/python_variable.cpp."""


def codegen_of(graph: torch.fx.Graph) -> torch.fx.graph.CodeGen:
    """Which kind of code a graph is written as. Look at: torch/fx/graph.py."""
    return graph._codegen


CapabilityBasedPartitioner = torch.fx.passes.infra.partitioner.CapabilityBasedPartitioner
"""The largest parts that a backend takes, without cycles. Look at: torch/fx/passes/infra/partitioner.py."""
OperatorSupportBase = torch.fx.passes.operator_support.OperatorSupportBase
"""What the partitioner asks. Look at: torch/fx/passes/operator_support.py."""
