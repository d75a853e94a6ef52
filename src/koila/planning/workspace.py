"""Workspaces: what operators allocate inside their kernels, beyond their results.

*Takes* an operator, its arguments and its result, as fake or as real tensors. *Gives* bytes, from formulas that
`python -m benchmarks.calibrate` checks against a malloc hook. They describe the CPU kernels of torch 2.13, as measured
on a machine with AVX2: where AVX-512 is there, oneDNN pads to 16 channels instead of 8 and runs bfloat16 itself, which
is not measured. Most of what is hidden is copies: of operands into a layout or a type that the kernel wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

Call = Mapping[str, Any]
"""The arguments of a call by name, defaults included."""
Formula = Callable[[Call, Any], int]
"""(arguments, result) → bytes."""

PRIMITIVE_BYTES = 40 << 10
"""What a oneDNN primitive needs for itself."""
HALF = (torch.bfloat16, torch.float16)


def workspace_bytes(
    target: OpOverload, args: Sequence[Any], result: Any, kwargs: Mapping[str, Any] | None = None
) -> int:
    """The most that an operator allocates while it runs, beyond its results as their shapes say.

    >>> a, b = torch.ones(512, 512)[:, ::2], torch.ones(256, 256)
    >>> workspace_bytes(torch.ops.aten.mm.default, (a, b), a @ b) == a.numel() * 4
    True
    """
    formula = _formula(target)
    return 0 if formula is None else int(formula(_named(target, args, kwargs or {}), result))


def retained_bytes(
    target: OpOverload, args: Sequence[Any], result: Any, kwargs: Mapping[str, Any] | None = None
) -> int:
    """What stays alive with the results beyond what their shapes say; `workspace_bytes` counts it, too.

    Reduced losses keep the storage of the unreduced ones, and fake RNN layers have no workspace for the backward.
    """
    if target in _RETAINING:
        call = _named(target, args, kwargs or {})
        return num_bytes(call["self"]) if call["reduction"] else 0
    if target is aten.mkldnn_rnn_layer.default:
        return _rnn_saved(_named(target, args, kwargs or {}), result)
    return 0


def num_bytes(tensor: torch.Tensor | None) -> int:
    """Bytes of a dense copy of a tensor."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _named(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    given = dict(zip((argument.name for argument in target._schema.arguments), args, strict=False))
    return {**_defaults(target), **given, **kwargs}


@cache
def _defaults(target: OpOverload) -> Call:
    return {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}


@cache
def _formula(target: OpOverload) -> Formula | None:
    if target in _TABLE:
        return _TABLE[target]
    return _casts if torch.Tag.pointwise in target.tags and target not in _NO_CASTS else None


# Copies of operands.


def _copy(tensor: torch.Tensor | None) -> int:
    """A kernel that calls `contiguous()` on an operand."""
    return 0 if tensor is None or tensor.is_contiguous() else num_bytes(tensor)


def _image_copy(tensor: torch.Tensor) -> int:
    """The same, where channels last is as good."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return 0
    return _copy(tensor)


def _copies(*names: str) -> Formula:
    return lambda call, _: sum(_copy(call[name]) for name in names)


def _image_copies(*names: str) -> Formula:
    return lambda call, _: sum(_image_copy(call[name]) for name in names)


def _casts(call: Call, result: Any) -> int:
    """Operands of a pointwise operator are cast to its common type, whole."""
    if not isinstance(result, torch.Tensor):
        return 0
    operands = [value for value in call.values() if isinstance(value, torch.Tensor) and value.dim()]
    types = {operand.dtype for operand in operands}
    if types == {result.dtype} or any(dtype.is_complex for dtype in types):
        return 0
    common = result.dtype if result.dtype != torch.bool else _promoted(types)
    return sum(operand.numel() for operand in operands if operand.dtype != common) * common.itemsize


def _promoted(types: set[torch.dtype]) -> torch.dtype:
    common = torch.bool
    for dtype in types:
        common = torch.promote_types(common, dtype)
    return common


def _where(call: Call, result: Any) -> int:
    return _casts({name: call[name] for name in ("self", "other")}, result)


# Matrix products.


def _orientation(matrix: torch.Tensor) -> str:
    """How BLAS can read a matrix: "n" row by row, "t" column by column, "copy" not at all."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    if right == 1 and down >= max(1, columns):
        return "n"
    return "t" if down == 1 and right >= max(1, rows) else "copy"


def _product(left: str, right: str) -> Formula:
    """One matrix at a time: copies of strided operands; a float32 result where half-precision kernels need one."""

    def formula(call: Call, result: Any) -> int:
        operands = [call[left], call[right]]
        copied = sum(prod(m.shape[-2:]) * m.element_size() for m in operands if _orientation(m) == "copy")
        widened = result.dtype in HALF and [_orientation(m) for m in operands] == ["t", "n"]
        return copied + (4 * prod(result.shape[-2:]) if widened else 0)

    return formula


# Reductions.


def _sum(call: Call, result: Any) -> int:
    source = call["self"]
    if source.dtype != result.dtype:
        return source.numel() * result.element_size()
    if source.dtype in HALF and _num_reduced_runs(source, call.get("dim")) > 1:
        return 4 * (source.numel() + result.numel())
    return 0


def _num_reduced_runs(source: torch.Tensor, dim: Sequence[int] | None) -> int:
    """Groups of reduced dimensions that do not follow each other in memory."""
    reduced = {d % source.dim() for d in dim} if dim else set(range(source.dim()))
    runs, inner = 0, None
    for d in sorted((d for d in range(source.dim()) if source.shape[d] > 1), key=lambda d: source.stride(d)):
        merges = inner is not None and source.stride(d) == source.stride(inner) * source.shape[inner]
        runs += d in reduced and not (merges and inner in reduced)
        inner = d
    return runs


def _mean(call: Call, result: Any) -> int:
    source = call["self"]
    wide = torch.float32 if result.dtype in HALF else result.dtype
    if source.dtype == wide:
        return 0
    return source.numel() * wide.itemsize + (result.numel() * wide.itemsize if wide != result.dtype else 0)


def _cast_scan(call: Call, result: Any) -> int:
    return 0 if call["self"].dtype == result.dtype else num_bytes(result)


def _truth(call: Call, result: Any) -> int:
    return 0 if call["self"].dtype in (torch.bool, torch.uint8) else call["self"].numel()


# Losses that PyTorch reduces itself.


def _loss(num_floats: int, num_halves: int) -> Formula:
    def formula(call: Call, result: Any) -> int:
        source = call["self"]
        if not call["reduction"]:
            return 0
        return num_bytes(source) * (num_halves if source.dtype in HALF else num_floats)

    return formula


# Attention.


def _blocks(call: Call) -> tuple[int, int, int]:
    """Queries and keys of the block that a thread works on, and the size of a head."""
    query, key = call["query"], call["key"]
    queries = query.shape[2]
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(block, queries), min(512, key.shape[2]), query.shape[3]


def _attention(call: Call, _: Any) -> int:
    queries, keys, head = _blocks(call)
    half = 2 * queries * keys if call["query"].dtype in HALF else 0
    return torch.get_num_threads() * (4 * queries * (keys + 2 + head) + half) + (8 << 10)


def _attention_backward(call: Call, _: Any) -> int:
    queries, keys, head = _blocks(call)
    half = 4 * (queries * keys + keys * head) if call["query"].dtype in HALF else 0
    return num_bytes(call["query"]) + torch.get_num_threads() * (8 * queries * keys + half) + (8 << 10)


# Recurrent layers.


def _rnn_weights(call: Call) -> int:
    return sum(num_bytes(call[name]) for name in ("weight0", "weight1", "weight2", "weight3"))


def _rnn_gates(call: Call) -> int:
    """Bytes of the gates of all steps, and of the states beside them."""
    steps = prod(call["input"].shape[:2])
    return int(1.035 * steps * 4 * call["hidden_size"] * call["input"].element_size())


def _rnn(call: Call, result: Any) -> int:
    return _rnn_gates(call) + _rnn_weights(call) + (150 << 10) + _rnn_saved(call, result)


def _rnn_saved(call: Call, result: Any) -> int:
    """What the layer keeps for its backward, trained or not; fake layers return nothing for it."""
    if num_bytes(result[3]):
        return 0
    source, hidden = call["input"], call["hidden_size"]
    length, batch = source.shape[:2]  # `batch_first` is history: the layer is given steps first.
    width = -(-max(source.shape[2], hidden) // 16) * 16 + 16
    return 4 * batch * (length + 1) * (8 * hidden + 7 * width) + (64 << 10)


def _rnn_backward(call: Call, _: Any) -> int:
    source = call["input"]
    weights = sum(num_bytes(call[f"weight{number}"]) for number in range(1, 5))
    gates = int(1.02 * prod(source.shape[:2]) * 4 * call["hidden_size"] * 4)
    return gates + 2 * weights + _copy(call["grad_output"]) + (300 << 10)


# Convolutions. oneDNN wants channels in blocks: it copies its operands into that layout, and its result out of it.


@cache
def _block() -> int:
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _up(size: int) -> int:
    return -(-size // _block()) * _block()


class _Convolution:
    """The bytes that convolution formulas are made of."""

    def __init__(self, call: Call, output: torch.Tensor) -> None:
        self.source, self.weight, self.output = call["input"], call["weight"], output
        self.groups, self.transposed = call["groups"], call["transposed"]
        self.kernel = tuple(self.weight.shape[2:])
        self.stride, self.padding, self.dilation = (
            _spread(call[name], len(self.kernel)) for name in ("stride", "padding", "dilation")
        )
        self.is_strided = max(self.stride) > 1
        self.is_half = self.source.dtype in HALF
        self.channels = self.source.shape[1]
        self.is_depthwise = self.groups == self.channels > 1
        self.is_flat = self.channels == 3
        self.backend = str(_backend(call, output)).rpartition(".")[2]

    @property
    def is_blocked(self) -> bool:
        """Whether oneDNN copies into its blocked layout."""
        if self.source.dim() != 4:
            return True
        last = torch.channels_last
        tensors = (self.source, self.weight)
        return not any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in tensors)

    @property
    def columns(self) -> int:
        """Bytes of the unfolded image of a sample and a group."""
        image, channels = (self.source, self.output.shape[1]) if self.transposed else (self.output, self.channels)
        return channels // self.groups * prod(self.kernel) * prod(image.shape[2:]) * self.source.element_size()

    @property
    def is_plain_product(self) -> bool:
        return prod(self.kernel) == 1 and not self.is_strided and not any(self.padding)

    @property
    def has_gemm_gradient(self) -> bool:
        """Whether oneDNN's gradient of the weight unfolds the image instead."""
        group = self.channels // self.groups
        far = self.is_depthwise and any(p > k // 2 for p, k in zip(self.padding, self.kernel, strict=True))
        uneven = self.groups > 1 and not (self.is_depthwise and self.output.shape[1] == self.channels)
        odd = uneven and (group % _block() != 0 or self.output.shape[1] // self.groups % _block() != 0)
        deep = len(self.kernel) == 3 and prod(self.kernel) > 1
        return max(self.dilation) > 1 or max(self.kernel) >= 14 or far or odd or deep

    def blocked(self, tensor: torch.Tensor) -> int:
        return num_bytes(tensor) // tensor.shape[1] * _up(tensor.shape[1])

    def blocked_source(self) -> int:
        return 0 if self.is_flat else self.blocked(self.source)

    def blocked_weight(self) -> int:
        outer, inner = self.weight.shape[:2]
        padded = _up(outer) * (inner if self.is_flat or self.groups > 1 else _up(inner))
        return num_bytes(self.weight) // (outer * inner) * padded

    def unit_stride(self) -> int:
        """A 1×1 kernel with a stride first gathers what it reads."""
        if prod(self.kernel) > 1 or not self.is_strided:
            return 0
        return torch.get_num_threads() * self.channels * prod(self.output.shape[2:]) * self.source.element_size()

    # The most that is alive, results included, while each of three things is computed.

    def forward_peak(self) -> int:
        output = num_bytes(self.output)
        if not self.is_blocked:
            return output + self.blocked_weight() + (64 << 10)
        made = self.blocked(self.output)
        held = self.blocked_source() + self.blocked_weight() + made
        if self.transposed:
            return max(held + made, 3 * made if self.is_strided else 0) + PRIMITIVE_BYTES
        return max(held + self.unit_stride(), made + output) + PRIMITIVE_BYTES

    def source_peak(self) -> int:
        """For the gradient of the input."""
        source = num_bytes(self.source)
        if not self.is_blocked:
            return source + self.blocked_weight() + (140 << 10)
        weight, given = self.blocked_weight(), self.blocked(self.output)
        if self.transposed:
            return max(given + weight + self.blocked(self.source), 2 * source) + PRIMITIVE_BYTES
        if not self.is_strided:
            made = self.blocked(self.source)
            return max(given + num_bytes(self.weight) + made, made + source) + PRIMITIVE_BYTES
        if self.is_flat:
            return max(given + num_bytes(self.weight) + 5 * source // 2, 3 * source) + PRIMITIVE_BYTES
        return max(given + weight + self.blocked(self.source), 3 * source) + PRIMITIVE_BYTES

    def weight_peak(self) -> int:
        """For the gradient of the weight."""
        weight = num_bytes(self.weight)
        if not self.is_blocked:
            return weight + 2 * self.blocked_weight() + PRIMITIVE_BYTES
        made = self.blocked_weight()
        if self.has_gemm_gradient:
            depth = self.output.shape[2] if len(self.kernel) == 3 else 1
            scratch = torch.get_num_threads() * (self.columns // depth + 4 * weight)
            return max(scratch + weight, made + weight) + PRIMITIVE_BYTES
        held = self.blocked_source() + self.blocked(self.output) + made + self.unit_stride()
        return max(held, made + weight) + PRIMITIVE_BYTES

    # The same without oneDNN: kernels unfold the image.

    def unfolded(self) -> tuple[int, int, int]:
        """Hidden bytes of the forward, of the gradient of the input, and of the gradient of the weight."""
        samples = self.source.shape[0]
        widened = 3 * self.columns if self.is_half else self.columns
        whole = samples * self.columns
        if self.transposed:
            return whole + (2 * self.columns if self.is_half else 0), self.columns, self.columns
        if self.backend.startswith("SlowDilated"):
            return self.columns, widened, self.columns
        if len(self.kernel) == 3:
            return (0 if self.is_plain_product else whole), whole, (0 if self.is_plain_product else whole)
        whole = 0 if self.is_plain_product else whole
        if self.groups == 1:
            return whole, widened, whole
        source, output = num_bytes(self.source) // self.groups, num_bytes(self.output) // self.groups
        forward = max(whole + source, num_bytes(self.output))
        backward = max(widened + source + output, num_bytes(self.source) + min(2 * (source + output), 128 << 10))
        return forward, backward, whole + source + output


def _spread(value: Sequence[int], num: int) -> tuple[int, ...]:
    return tuple(value) * num if len(value) == 1 else tuple(value)


def _backend(call: Call, output: torch.Tensor) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return torch._C._select_conv_backend(*(call.get(name) for name in names), [output.shape[1]])


def _uses_onednn(convolution: _Convolution) -> bool:
    # The backend of transposed convolutions has no name in Python.
    return convolution.backend in ("Mkldnn", "???") or "Mkldnn" in convolution.backend


def _convolution(call: Call, result: Any) -> int:
    found = _Convolution(call, result)
    if found.backend.startswith("Empty"):
        return 0
    contiguous = _image_copy(found.source)
    if _uses_onednn(found):
        return contiguous + found.forward_peak() - num_bytes(result)
    return contiguous + found.unfolded()[0]


def _convolution_backward(call: Call, result: Any) -> int:
    """First the gradient of the input, then that of the weight, then, without oneDNN, that of the bias."""
    found = _Convolution(call, call["grad_output"])
    if found.backend.startswith("Empty"):
        return 0
    wanted = call["output_mask"]
    source, weight, bias = (num_bytes(tensor) if asked else 0 for tensor, asked in zip(result, wanted, strict=True))
    # The layout of the input and the weight decides: a gradient in channels last is copied, too.
    copied = _copy if found.is_blocked else _image_copy
    contiguous = copied(found.source) + copied(found.output)
    if _uses_onednn(found):
        peaks = (found.source_peak(), source + found.weight_peak(), 0)
    else:
        _, for_source, for_weight = found.unfolded()
        for_bias = 2 * num_bytes(found.output) // found.groups if found.is_half else 0
        peaks = (source + weight + for_source, source + weight + for_weight, source + weight + bias + for_bias)
    peak = max(peak for peak, asked in zip(peaks, wanted, strict=True) if asked)
    return contiguous + max(0, peak - source - weight - bias)


# Normalisation.


def _layer_norm_backward(call: Call, _: Any) -> int:
    sums = 2 * prod(call["normalized_shape"]) * 4 * torch.get_num_threads()
    return _copy(call["grad_out"]) + _copy(call["input"]) + (sums if any(call["output_mask"][1:]) else 0)


def _batch_norm_backward(call: Call, _: Any) -> int:
    if not call["output_mask"][0]:
        return 0
    if call["grad_out"].is_contiguous() and call["input"].is_contiguous():
        return num_bytes(call["input"])
    return 2 * num_bytes(call["input"]) if call["input"].dtype in HALF else 0


def _rms_norm(call: Call, _: Any) -> int:
    half = call["input"].dtype in HALF
    return num_bytes(call["input"]) * (5 if half else 1) + (4 * num_bytes(call["weight"]) if half else 0) + (16 << 10)


def _softmax(names: tuple[str, ...], half_bytes: int) -> Formula:
    def formula(call: Call, result: Any) -> int:
        inner = call["dim"] % result.dim() != result.dim() - 1 if result.dim() else False
        return sum(_copy(call[name]) + (16 << 10) for name in names) + (
            half_bytes if inner and result.dtype in HALF else 0
        )

    return formula


def _like(name: str) -> Formula:
    return lambda call, _: num_bytes(call[name])


def _rows(name: str, per_element: int) -> Formula:
    """Buffers along the dimension that an operator works on."""

    def formula(call: Call, _: Any) -> int:
        source = call[name]
        return source.shape[call["dim"]] * per_element if source.dim() else 0

    return formula


def _upsample_backward(call: Call, result: Any) -> int:
    given = call["grad_output"]
    if given.dtype in HALF and not given.is_contiguous() and not _image_copy(given):
        return 4 * result.numel() // result.shape[0]
    return _image_copy(given)


def _average_backward(call: Call, result: Any) -> int:
    given = call["grad_output"]
    return num_bytes(result) if not given.is_contiguous() and not _image_copy(given) else _image_copy(given)


def _scatter(call: Call, result: Any) -> int:
    """Half precision is scattered into a float32 copy."""
    return 4 * result.numel() if result.dtype in HALF else 0


def _scatter_add(call: Call, result: Any) -> int:
    """The same, unless whole rows are added."""
    rows = call["index"].dim() > 1 and call["dim"] == 0 and call["index"].stride(-1) == 0
    return 0 if rows else _scatter(call, result)


def _transform(per_element: int) -> Formula:
    """Buffers for one transform."""

    def formula(call: Call, result: Any) -> int:
        return max(max(call["self"].shape[d], result.shape[d]) for d in call["dim"]) * per_element

    return formula


def _linear_algebra(times: int, per_row: int) -> Formula:
    return lambda call, _: times * num_bytes(call["A"]) + per_row * call["A"].shape[-1]


_NO_CASTS = {aten._to_copy.default, aten.clone.default, aten.copy.default, aten.masked_fill.Scalar}
_RETAINING = {aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default}

_TABLE: dict[OpOverload, Formula] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.mm.default: _product("self", "mat2"),
    aten.addmm.default: _product("mat1", "mat2"),
    aten.bmm.default: _product("self", "mat2"),
    aten.baddbmm.default: _product("batch1", "batch2"),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.mkldnn_rnn_layer.default: _rnn,
    aten.mkldnn_rnn_layer_backward.default: _rnn_backward,
    aten.native_layer_norm.default: _copies("input"),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._softmax.default: _softmax(("self",), 256 << 10),
    aten._log_softmax.default: _softmax(("self",), 256 << 10),
    aten._softmax_backward_data.default: _softmax(("grad_output", "output"), 512 << 10),
    aten._log_softmax_backward_data.default: _softmax(("grad_output", "output"), 512 << 10),
    aten.logsumexp.default: _like("self"),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.prod.default: _sum,
    aten.cumsum.default: _cast_scan,
    aten.cumprod.default: _cast_scan,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.where.self: _where,
    aten.embedding_dense_backward.default: _copies("grad_output"),
    aten.max_pool2d_with_indices.default: _image_copies("self"),
    aten.max_pool2d_with_indices_backward.default: _image_copies("grad_output"),
    aten.avg_pool2d.default: _image_copies("self"),
    aten.avg_pool2d_backward.default: _average_backward,
    aten._adaptive_avg_pool2d.default: _image_copies("self"),
    aten.upsample_nearest2d_backward.default: _upsample_backward,
    aten.upsample_bilinear2d_backward.default: _upsample_backward,
    aten.native_dropout.default: lambda call, _: num_bytes(call["input"]) if call["train"] else 0,
    aten.mse_loss.default: _loss(2, 4),
    aten.smooth_l1_loss.default: _loss(2, 4),
    aten.huber_loss.default: _loss(1, 3),
    aten.binary_cross_entropy.default: _loss(1, 3),
    aten.binary_cross_entropy_with_logits.default: _loss(2, 4),
    aten.sort.default: _rows("self", 8),
    aten.topk.default: _rows("self", 16),
    aten.kthvalue.default: lambda call, _: num_bytes(call["self"]) + 8 * call["self"].numel(),
    aten.median.dim: lambda call, _: _copy(call["self"]) + 10 * call["self"].shape[call["dim"]],
    aten.index_add.default: lambda call, _: 56 * call["index"].numel(),
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_reduce.two: _scatter_add,
    aten.scatter_add.default: _scatter_add,
    aten.gather.default: _scatter,
    aten._fft_r2c.default: _transform(32),
    aten._fft_c2c.default: _transform(120),
    aten._fft_c2r.default: lambda call, result: (
        (num_bytes(call["self"]) if len(call["dim"]) > 1 else 0) + _transform(32)(call, result)
    ),
    aten.linalg_inv_ex.default: _linear_algebra(1, 32),
    aten._linalg_eigh.default: _linear_algebra(2, 64),
    aten._linalg_svd.default: _linear_algebra(4, 80),
    aten.linalg_qr.default: _linear_algebra(0, 272),
}
"""Operators with a workspace; pointwise ones that mix types have one, too (`_casts`); all others have none."""
