"""Everything that koila uses of PyTorch although it is not public API, in one place.

Takes: PyTorch. Gives: a name for each use that says what it is for, with the reason and what to look at when PyTorch
changes. `version` refuses releases that are not supported before anything private is touched, `operators` lists the
private operators of aten, `distributed` knows collectives and DDP, `delegates` and `inductor` hold what only these
optional parts need, because it is slow to import. `tests/structure/test_private_torch.py` finds uses elsewhere.

What records a call stands on the hot path, so names are aliases or `attrgetter`s and not functions wherever possible.
"""

from koila._torch.version import SUPPORTED as SUPPORTED
from koila._torch.version import check_version as check_version

# isort: split
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch._C._autograd
import torch._decomp
import torch._ops
import torch._prims_common
import torch._subclasses.fake_tensor
import torch.autograd.grad_mode
import torch.fx.experimental.proxy_tensor
import torch.utils._python_dispatch

from koila._torch.distributed import BROADCAST_COALESCED as BROADCAST_COALESCED
from koila._torch.distributed import FIND_TENSORS as FIND_TENSORS
from koila._torch.distributed import GROUP_METHODS as GROUP_METHODS
from koila._torch.distributed import POST_FORWARD as POST_FORWARD
from koila._torch.distributed import finished as finished
from koila._torch.distributed import is_collective as is_collective
from koila._torch.distributed import tree_flatten as tree_flatten
from koila._torch.distributed import tree_unflatten as tree_unflatten
from koila._torch.fakes import in_turn as in_turn
from koila._torch.fakes import without_modes as without_modes
from koila._torch.operators import PRIVATE_OPERATORS as PRIVATE_OPERATORS

# Operators as objects.

OpOverload = torch._ops.OpOverload
"""The class of operators: whether a target is one, and the keys of every table. Look at: torch/_ops.py."""
OpOverloadPacket = torch._ops.OpOverloadPacket
"""All overloads of an operator under its name. Look at: torch/_ops.py."""
schema_of: Callable[[OpOverload], torch._C.FunctionSchema] = attrgetter("_schema")
"""Arguments by name, results, and what an operator writes. Look at: torch/_ops.py, torch._C.FunctionSchema."""
overload_name: Callable[[OpOverload], str] = attrgetter("_overloadname")
"""`Tensor` of `add.Tensor`, to find the in-place form of the same overload. Look at: torch/_ops.py."""
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel of its own for a key. Look at: torch/csrc/utils/python_dispatch.cpp."""
get_decompositions = torch._decomp.get_decompositions
"""PyTorch's own decompositions of some operators. Look at: torch/_decomp/__init__.py; exactness finds changes."""

# Memory: which tensors share it, and what was written.

storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The identity of a storage, also of a fake one, whose `data_ptr` is 0. Look at: torch/storage.py."""
num_owners: Callable[[torch.Tensor], int] = methodcaller("_use_count")
"""How many views, saved tensors and Python objects together have a tensor. Look at: python_variable_methods.cpp."""
is_autograd_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether autograd takes a tensor for a view. Look at: torch/csrc/autograd/python_variable.cpp; `_base` is public."""
write_count: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was written; inference tensors raise. Look at: torch/csrc/autograd/python_variable.cpp."""
VERSION_GETTER: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""What `__torch_function__` is given when `_version` of a lazy tensor is read. Look at: torch/overrides.py."""
DATA_GETTER: Any = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
"""PyTorch's own `tensor.data`, over which a property is put. Look at: torch/csrc/autograd/python_variable.cpp."""
DATA_SETTER: Any = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
"""PyTorch's own `tensor.data = other`, which takes a wrapper without memory. Look at: the same file."""
TO_DLPACK: Any = torch._C._to_dlpack
"""PyTorch's own `torch.utils.dlpack.to_dlpack`, which asks nobody. Look at: torch/csrc/Module.cpp."""
preserve_version = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""A restored tensor keeps its version (Rule 4). Look at: torch/autograd/grad_mode.py; FSDP uses it."""
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
"""A view with the negative bit, to build a tensor of a known layout. Look at: native_functions.yaml, `_neg_view`."""
TYPED_STORAGE = "_typed_storage"
"""The method that gives data away to serialisation. Look at: torch/_tensor.py."""

# Lazy tensors: a wrapper without storage, and what lies below it.

make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""Shape, strides and dtype without storage. Look at: torch/csrc/autograd/python_variable.cpp, its signature grows."""
without_torch_function = torch._C.DisableTorchFunctionSubclass
"""The real method inside `__torch_function__`. Look at: torch/overrides.py, whose notes describe it."""
plain_call: Callable[[Any, Any, Any, Any], Any] = torch._C._disabled_torch_function_impl
"""The real function inside `__torch_function__`, faster than a `with` statement. Look at: the same notes; the arguments
are those of `__torch_function__`."""
is_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether `__torch_function__` of subclasses is asked: not inside `without_torch_function`. Look at: the same notes."""
is_function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Whether a mode (`with torch.device(...)`) sees every call. Look at: torch/overrides.py."""
C_METHODS: dict[str, Any] = {
    name: method
    for name, method in vars(torch._C.TensorBase).items()
    if name == "__getitem__" or (type(method) is type(torch._C.TensorBase.size) and not name.startswith("_"))
}
"""Methods of tensors that are written in C++, and are what `__torch_function__` is given when one of them is called.

Reflected operators are not among them: Python would prefer those of a subclass. Look at: torch/_tensor.py, whose
`Tensor` puts its own methods over some of them.
"""
wrapper_size: Any = torch._C.TensorBase.size
"""What a wrapper itself says of its sizes. Look at: torch/csrc/autograd/python_variable.cpp."""
wrapper_stride: Any = torch._C.TensorBase.stride
"""What a wrapper itself says of its strides. Look at: torch/csrc/autograd/python_variable.cpp."""
throw_on_data_access: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""C++ that asks a wrapper for its data gets an error instead of a null pointer, as from a `FakeTensor`.

Look at: torch/csrc/Module.cpp, torch/_subclasses/fake_tensor.py.
"""
_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
_IN_PLACE_OR_VIEW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_TRACING_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in (
        "Python",
        "PythonTLSSnapshot",
        "Functionalize",
        "FuncTorchDynamicLayerFrontMode",
        "FuncTorchDynamicLayerBackMode",
    )
)
is_key_excluded: Callable[[torch._C.DispatchKey], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
"""Whether this thread skips a dispatch key. Look at: torch/csrc/utils/python_dispatch.cpp."""
PYTHON_KEY = torch._C.DispatchKey.Python
"""The key under which modes and subclasses see operators. `torch.tensor` skips it while it reads its elements, and
fake tensors would be real meanwhile. Look at: torch/csrc/utils/tensor_new.cpp, `internal_new_from_data`."""


def ordinary_dispatch() -> AbstractContextManager[Any]:
    """Modes, subclasses and autograd as in the user's own code, inside code of PyTorch that runs below them.

    Inference mode excludes autograd by itself, and keeps doing so. Look at: c10/core/DispatchKey.h for the names of the
    keys, torch/csrc/utils/python_dispatch.cpp for the guard.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in _TRACING_KEYS:
        exclude = exclude.remove(key)
    if not torch.is_inference_mode_enabled():
        exclude = exclude - _AUTOGRAD - _IN_PLACE_OR_VIEW
    return torch._C._ForceDispatchKeyGuard(include, exclude)


_exclude_set: Callable[[], Any] = torch._C._dispatch_tls_local_exclude_set
_ORDINARY: int = _exclude_set().raw_repr()


_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_inference_enabled = torch.is_inference_mode_enabled


def is_state_ordinary() -> bool:
    """Whether no mode sees functions or operators, inference mode is off, and the calling thread skips the dispatch
    keys that the user's own code skips, and no others. Every prepared run asks.

    Look at: torch/overrides.py, torch/csrc/autograd/init.cpp, torch/csrc/utils/python_dispatch.cpp.
    """
    if is_function_mode_enabled() or _num_modes() > 0 or _is_inference_enabled():
        return False
    return bool(_exclude_set().raw_repr() == _ORDINARY)


# State that a recorded call carries; see `switches` for the rest of it.

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""One question for all devices, mostly answered with no. Look at: torch/csrc/autograd/init.cpp."""

# Autograd's graph.

SAVED_PREFIX = "_raw_saved_"
"""Attributes of a node that hold what it keeps for backward, as it is kept: no unpack hook of the user's is called.

Look at: derivatives.yaml, gen_autograd_functions.py; torch/csrc/autograd/init.cpp for `SavedTensor`.
"""
input_metadata: Callable[[Any], Any] = attrgetter("_input_metadata")
"""Shapes and dtypes of the gradients that a node receives. Look at: torch/csrc/autograd/python_cpp_function.cpp."""
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The order in which autograd runs its nodes, latest first. Look at: torch/csrc/autograd/python_cpp_function.cpp."""
current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that goes on; -1 outside of one. Look at: torch/autograd/graph.py, which asks it."""
tensor_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""Hooks that a user registered on a tensor; None or empty without any. Look at: torch/_tensor.py, `register_hook`."""
accumulation_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""The same for `register_post_accumulate_grad_hook`. Look at: torch/_tensor.py."""
_run_backward: Callable[..., Any] = torch.autograd.graph._engine_run_backward


def backward_from(loss: torch.Tensor, retain_graph: bool) -> None:
    """`loss.backward(retain_graph=...)` of a plain tensor that has one element, of a floating type.

    The public function looks for what else it may have been given, which takes as long as a few recorded calls.
    Look at: torch/autograd/__init__.py, `backward` and `_make_grads`.
    """
    seeds = (torch.ones_like(loss),)
    _run_backward((loss,), seeds, retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


hash_tensor: Callable[[torch.Tensor], torch.Tensor] = torch.hash_tensor
"""The bits of all elements, combined. Not documented yet. Look at: aten/src/ATen/native/ReduceOps.cpp."""
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether this backward was given `retain_graph`. Look at: torch/utils/checkpoint.py, which asks it, too."""


def will_run(node: Any) -> bool:
    """Whether the backward pass that goes on runs a node of autograd.

    Of a leaf `torch.autograd.grad` says nothing: it stops there, or does not come by.
    Look at: torch/csrc/autograd/init.cpp.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost hooks on saved tensors, or None; asked by every call. Look at: torch/autograd/graph.py."""


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """No hooks on saved tensors inside: what runs there was recorded elsewhere, or runs on fake tensors.

    Look at: torch/autograd/graph.py, `saved_tensors_hooks`.
    """
    taken = []
    while (hooks := saved_tensors_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
"""What happens before and after a checkpointed function, replaced. Look at: torch/utils/checkpoint.py."""

# Fake tensors, tracing, modes.

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
"""A tensor without memory: trackers must not count it. Look at: torch/_subclasses/fake_tensor.py."""
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
"""Shapes without memory, as export uses it; see `in_turn`. Look at: torch/_subclasses/fake_tensor.py."""
suggested_format = torch._prims_common.suggest_memory_format
"""The memory format that kernels take for a tensor which has none. Look at: torch/_prims_common/__init__.py."""
INNER_MODES = ("torch._", "torch.fx.")
"""Where modes are defined with which PyTorch looks at programs, and which are no part of a user's. Look at: the classes
that inherit from TorchDispatchMode."""
FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""Logs a traceback for every wrong shape; it is silenced. Look at: torch/_subclasses/fake_tensor.py, `log`."""
get_proxy_mode = torch.fx.experimental.proxy_tensor.get_proxy_mode
"""The trace that is made now. Look at: torch/fx/experimental/proxy_tensor.py."""
graph_root: Callable[[torch.fx.Graph], torch.fx.Node] = attrgetter("_root")
"""The ends of a graph's list of nodes: what was traced since a point. Look at: torch/fx/graph.py."""


def dissolve(graph: torch.fx.Graph) -> None:
    """Take a graph apart that nobody reads any more.

    Its nodes hold each other, and its namespace holds them all: they would wait for a full collection, which is rare
    where PyTorch has made millions of objects. Look at: torch/fx/graph.py, `Graph.erase_node`, which does the same for
    one node and takes three times as long.
    """
    for node in reversed(list(graph.nodes)):
        node._update_args_kwargs((), {})
        node._remove_from_list()
        node._erased = True
    graph._len = 0
    graph._find_nodes_lookup_table.table.clear()
    graph._graph_namespace._obj_to_name.clear()


TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Sees operators as they run. Look at: torch/utils/_python_dispatch.py; everybody uses it."""


class RunMode(TorchDispatchMode):
    """Sees the operators of runs. Any other mode is the user's: it sees the calls that are made inside of it."""


current_mode = torch.utils._python_dispatch._get_current_dispatch_mode
"""The innermost mode that sees operators, or None. Look at: torch/utils/_python_dispatch.py."""

CONTEXT_MODULE = "torch.utils._contextlib"
"""Its frames (`no_grad` as a decorator) are left out of a user's traceback. Look at: torch/utils/_contextlib.py."""


def make_fx(function: Callable[..., Any], table: dict[Any, Any]) -> Callable[..., torch.fx.GraphModule]:
    """Trace a function on fake tensors in which real constants may occur.

    Look at: torch/fx/experimental/proxy_tensor.py, on which AOTAutograd stands; `_allow_non_fake_inputs` is private.
    """
    trace = torch.fx.experimental.proxy_tensor.make_fx
    return trace(function, decomposition_table=table, _allow_non_fake_inputs=True)


# The processor and its kernels.


def convolution_backend(*arguments: Any) -> str:
    """The library that runs a convolution; transposed ones of oneDNN have the name `???`.

    Look at: aten/src/ATen/native/Convolution.cpp, `ConvBackend`, and its binding in torch/csrc/Module.cpp.
    """
    return str(torch._C._select_conv_backend(*arguments)).rpartition(".")[2]


def has_avx512() -> bool:
    """oneDNN's choice: `torch.backends.cpu.get_cpu_capability` obeys ATEN_CPU_CAPABILITY, which oneDNN does not read.

    Look at: torch/cpu/__init__.py.
    """
    return torch.cpu._is_avx512_supported()


def has_avx2() -> bool:
    """As `has_avx512`. Look at: torch/cpu/__init__.py."""
    return torch.cpu._is_avx2_supported()


def onednn_has_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 here. Look at: aten/src/ATen/native/mkldnn/Utils.h."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_has_float16() -> bool:
    """Whether oneDNN computes in float16 here. Look at: aten/src/ATen/native/mkldnn/Utils.h."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
