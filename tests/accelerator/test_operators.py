"""Operators that only accelerators have: their rules, and those that have none, each with its reason."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

import koila
from koila import events
from koila.analysis.decompositions import decompositions
from koila.analysis.rules import devices, rule_for
from koila.ir import attention
from tests.accelerator import sim
from tests.accelerator.trial import assert_kept, distance, forget, step

OPERATORS = {
    "efficient attention": ("attention", partial(sim.attention, 2), "_scaled_dot_product_efficient_attention"),
    "overrideable attention": (
        "attention", partial(sim.attention, 3), "_scaled_dot_product_fused_attention_overrideable",
    ),
    "lstm cell": ("lstm", partial(sim.attention, 1), "_thnn_fused_lstm_cell"),
    "gru cell": ("gru", partial(sim.attention, 1), "_thnn_fused_gru_cell"),
}  # fmt: skip
"""By what it is: a program, the switch that makes the device use it, and an operator that then runs."""


@pytest.fixture(autouse=True)
def unknown() -> None:
    """The device's switches change which operators a program calls; koila does not see them."""
    forget()


@pytest.mark.parametrize("chunk", [5, 1])
@pytest.mark.parametrize("which", OPERATORS)
def test_operators_of_devices_are_cut(which: str, chunk: int) -> None:
    name, switch, operator = OPERATORS[which]
    with switch():
        expected, found = step(name), step(name, koila.lazy, partial(koila.budget, chunk_size=chunk))
    assert events.counters().get(f"executed::aten.{operator}.default", 0) >= 12 // chunk
    assert distance(found, expected) < 1e-10


def cudnn_norm() -> AbstractContextManager[None]:
    return sim.cudnn_norm()


@pytest.mark.parametrize("chunk", [12, 5, 1])
def test_the_norm_of_cudnn_is_taken_apart(chunk: int) -> None:
    with cudnn_norm():
        expected, found = step("cnn"), step("cnn", koila.lazy, partial(koila.budget, chunk_size=chunk))
    assert found.report.how == ("whole" if chunk == 12 else "split")
    assert "executed::aten.cudnn_batch_norm.default" not in events.counters()
    assert distance(found, expected) < 1e-10


def test_the_norm_of_cudnn_inside_a_budget() -> None:
    with cudnn_norm():
        expected = step("cnn")
        found = step("cnn", partial(koila.lazy, budget=int(0.5 * expected.peak_bytes)))
    assert_kept(found)
    assert distance(found, expected) < 1e-10


def test_statistics_that_the_norm_of_cudnn_hides_are_seen_by_whoever_reads_them() -> None:
    given, read = torch.randn(8, 4, device="sim"), []
    with cudnn_norm():
        for maker in (lambda tensor: tensor, koila.lazy):
            norm = torch.nn.BatchNorm1d(4, device="sim")
            norm(maker(given))
            read.append(norm.running_mean.cpu())
    assert torch.equal(*read)


@pytest.mark.parametrize("counted", [False, True], ids=["drawn like the CPU", "seed and offset"])
@pytest.mark.parametrize("which", [2, 3], ids=["efficient", "overrideable"])
def test_attention_with_dropout_has_the_mask_of_its_kernel(which: int, counted: bool) -> None:
    with sim.attention(which), sim.counted_generator(counted):
        expected = step("attention with dropout")
        assert distance(step("attention with dropout", koila.lazy), expected) == 0
        for chunk in (5, 1):
            found = step("attention with dropout", koila.lazy, partial(koila.budget, chunk_size=chunk))
            assert found.report.how == "split" and not found.report.fallbacks
            assert distance(found, expected) < 1e-10


def test_attention_with_dropout_inside_a_budget() -> None:
    """Measured from the run on: recording draws the mask."""
    with sim.attention(2):
        expected = step("attention with dropout")
        lazy = partial(koila.lazy, budget=int(0.5 * expected.peak_bytes))
        found = step("attention with dropout", lazy, koila.measure)
    assert_kept(found)
    assert found.report.how == "split" and distance(found, expected) < 1e-10


def test_a_kernel_that_draws_otherwise_runs_at_once_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test finds another result with the mask that it was told."""
    told = attention.attention_mask
    monkeypatch.setattr(attention, "attention_mask", lambda *args: told(*args).logical_not_())
    attention._tells_its_mask.cache_clear()
    with sim.attention(2):
        expected = step("attention with dropout")
        found = step("attention with dropout", koila.lazy, partial(koila.budget, chunk_size=5))
    attention._tells_its_mask.cache_clear()
    assert events.counters()["forced::random numbers that depend on data"] == 1
    assert distance(found, expected) < 1e-10


def test_whoever_calls_the_operator_itself_gets_its_seed() -> None:
    given = torch.randn(2, 3, 8, 4, device="sim")
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    seeds = []
    for maker in (lambda tensor: tensor, koila.lazy):
        torch.manual_seed(5)
        seeds.append(operator(maker(given), given, given, None, True, 0.5)[2])
    assert seeds[0].item() == seeds[1].item()


# Operators of aten that have no kernel on a CPU, from torch's own schemas.


ELSEWHERE = (
    "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutogradNestedTensor", "BackendSelect", "ZeroTensor", "SparseCPU", "SparseCsrCPU",
    "QuantizedCPU", "MkldnnCPU", "NestedTensorCPU",
)  # fmt: skip
"""Keys under which an operator is no operator of a device alone."""

WHOLE: dict[str, tuple[str, ...]] = {
    "below `convolution`, which is what programs call and what has the rule": (
        "_conv_depthwise2d", "_mps_convolution", "_mps_convolution_transpose", "conv_depthwise3d",
        "cudnn_convolution", "cudnn_convolution_add_relu", "cudnn_convolution_relu", "cudnn_convolution_transpose",
        "miopen_convolution", "miopen_convolution_add_relu", "miopen_convolution_relu",
        "miopen_convolution_transpose", "miopen_depthwise_convolution", "mps_convolution_backward",
        "mps_convolution_transpose_backward",
    ),
    "below `scaled_dot_product_attention`, or called with sequences packed into one": (
        "_cudnn_attention_backward", "_cudnn_attention_forward", "_efficient_attention_backward",
        "_efficient_attention_forward", "_flash_attention_backward", "_flash_attention_forward",
        "_flash_attention_forward.quantized", "_flash_attention_forward_no_dropout_inplace",
        "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_flash_attention.quantized",
        "_triton_multi_head_attention", "_triton_scaled_dot_attention",
    ),
    "a recurrent layer in one call: traced cell by cell, or whole if it drops out or casts": (
        "_cudnn_rnn", "_cudnn_rnn_backward", "_cudnn_rnn_flatten_weight", "miopen_rnn", "miopen_rnn_backward",
    ),
    "a recurrent layer whose backward gives its gradients as a list": ("_lstm_mps", "lstm_mps_backward"),
    "its results depend on lengths that are data": (
        "_cudnn_ctc_loss", "_cudnn_ctc_loss.Tensor", "_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor",
        "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor", "miopen_ctc_loss", "miopen_ctc_loss.Tensor",
    ),
    "weights or products of quantised, scaled or sparse data, whose formats belong to the whole": (
        "_convert_weight_to_int4pack", "_cslt_compress", "_cslt_sparse_mm", "_cslt_sparse_mm_search",
        "_mixed_dtypes_linear", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_sparse_semi_structured_addmm",
        "_sparse_semi_structured_apply", "_sparse_semi_structured_apply_dense", "_sparse_semi_structured_linear",
        "_sparse_semi_structured_mm", "_sparse_semi_structured_tile", "_spsolve", "_to_sparse_semi_structured",
        "_weight_int4pack_mm", "_weight_int4pack_mm_with_scales_and_zeros",
    ),
    "nested tensors, which are left as they are": (
        "_nested_from_padded_tensor", "_nested_get_jagged_dummy", "_nested_get_lengths", "_nested_get_max_seqlen",
        "_nested_get_min_seqlen", "_nested_get_offsets", "_nested_get_ragged_idx", "_nested_get_values",
        "_nested_view_from_jagged",
    ),
    "random numbers by keys of the user's own": (
        "_fill_mem_eff_dropout_mask_", "_philox_key_fold_in", "_philox_key_split", "_philox_normal_",
        "_philox_uniform_",
    ),
    "statistics that several processes share": (
        "batch_norm_backward_elemt", "batch_norm_backward_reduce", "batch_norm_elemt", "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts", "batch_norm_stats",
    ),
    "copies and streams below what programs call": (
        "_copy_from", "_copy_from_and_resize", "_resize_output_", "record_stream",
    ),
    "a form of another operator that one kind of device prefers": (
        "_masked_scale", "addmm.dtype", "baddbmm.dtype", "bmm.dtype", "cudnn_affine_grid_generator",
        "cudnn_affine_grid_generator_backward", "cudnn_grid_sampler", "cudnn_grid_sampler_backward",
        "max_pool2d_backward", "mm.dtype",
    ),
}  # fmt: skip
"""By reason, the operators that have no rule: they run whole, which costs memory, never correctness (Rule 3)."""


def device_operators() -> set[str]:
    """Operators without a kernel for a CPU; forms that write into given memory are known by the plain ones."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {name for name in names if not any(has_kernel(name, key) for key in ELSEWHERE)}
    return {name.removeprefix("aten::") for name in found if not name.endswith("out")}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, form = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), form or "default")


def test_every_operator_of_devices_has_a_rule_or_a_reason() -> None:
    ruled = {name for name in device_operators() if rule_for(overload(name)) or overload(name) in decompositions()}
    listed = {name for names in WHOLE.values() for name in names}
    assert device_operators() - ruled - listed == set(), "no rule and no reason"
    assert listed & ruled == set(), "a reason, but there is a rule"
    assert listed - device_operators() == set(), "not an operator of devices alone"


def test_rules_that_follow_from_reading_are_said_to() -> None:
    """All others are cut on the simulated device by the tests above."""
    shown = {operator for _, _, operator in OPERATORS.values()}
    forward = {str(row).split(".")[1] for row in devices.ROWS if row not in devices.BY_READING}
    assert {name for name in forward if "backward" not in name} == shown
