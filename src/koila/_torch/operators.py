"""The private operators of aten that koila relies on; importing this module checks that this PyTorch has them.

Takes: `torch.ops.aten`. Gives: `PRIVATE_OPERATORS`, or an `ImportError` that names the missing ones.

An operator with a leading underscore is what the dispatcher really calls; there is no public name for it. They are
keys of the tables (rules, decompositions, workspaces, forms) and stand there by name; `tests/structure` keeps this list
equal to what the tables use.
Look at: aten/src/ATen/native/native_functions.yaml, which renames, adds and drops them from release to release.
"""

from collections.abc import Iterable

import torch

from koila.errors import compose_message

PRIVATE_OPERATORS = frozenset(
    {
        "_adaptive_avg_pool2d.default",
        "_adaptive_avg_pool2d_backward.default",
        "_adaptive_avg_pool3d.default",
        "_adaptive_avg_pool3d_backward.default",
        "_batch_norm_with_update.default",
        "_batch_norm_with_update_functional.default",
        "_cdist_backward.default",
        "_cdist_forward.default",
        "_conj.default",
        "_conj_copy.default",
        "_embedding_bag.default",
        "_embedding_bag_backward.default",
        "_embedding_bag_forward_only.default",
        "_embedding_bag_per_sample_weights_backward.default",
        "_euclidean_dist.default",
        "_fft_c2c.default",
        "_fft_c2r.default",
        "_fft_r2c.default",
        "_fused_rms_norm.default",
        "_fused_rms_norm_backward.default",
        "_linalg_check_errors.default",
        "_linalg_det.default",
        "_linalg_eigh.default",
        "_linalg_slogdet.default",
        "_linalg_solve_ex.default",
        "_linalg_svd.default",
        "_log_softmax.default",
        "_log_softmax.out",
        "_log_softmax_backward_data.default",
        "_log_softmax_backward_data.out",
        "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional.default",
        "_native_batch_norm_legit_no_training.default",
        "_native_multi_head_attention.default",
        "_neg_view.default",
        "_neg_view_copy.default",
        "_prelu_kernel.default",
        "_prelu_kernel_backward.default",
        "_reshape_alias.default",
        "_safe_softmax.default",
        "_scaled_dot_product_cudnn_attention.default",
        "_scaled_dot_product_cudnn_attention_backward.default",
        "_scaled_dot_product_efficient_attention.default",
        "_scaled_dot_product_efficient_attention_backward.default",
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_flash_attention_backward.default",
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        "_scaled_dot_product_fused_attention_overrideable.default",
        "_scaled_dot_product_fused_attention_overrideable_backward.default",
        "_scaled_mm.default",
        "_softmax.default",
        "_softmax.out",
        "_softmax_backward_data.default",
        "_softmax_backward_data.out",
        "_thnn_fused_gru_cell.default",
        "_thnn_fused_gru_cell_backward.default",
        "_thnn_fused_lstm_cell.default",
        "_thnn_fused_lstm_cell_backward_impl.default",
        "_to_copy.default",
        "_transformer_encoder_layer_fwd.default",
        "_trilinear.default",
        "_unsafe_index.Tensor",
        "_unsafe_index_put.default",
        "_unsafe_view.default",
        "_upsample_bicubic2d_aa.default",
        "_upsample_bicubic2d_aa_backward.default",
        "_upsample_bilinear2d_aa.default",
        "_upsample_bilinear2d_aa_backward.default",
        "_upsample_nearest_exact1d.default",
        "_upsample_nearest_exact1d_backward.default",
        "_upsample_nearest_exact2d.default",
        "_upsample_nearest_exact2d_backward.default",
        "_upsample_nearest_exact3d.default",
        "_upsample_nearest_exact3d_backward.default",
    }
)
"""Name and overload of each, without `aten.`."""


def check_operators(names: Iterable[str]) -> None:
    """Refuse a PyTorch that does not have one of these operators of aten.

    >>> check_operators(["_softmax.default"])
    >>> check_operators(["_softmax.default", "_softmax.quick"])
    Traceback (most recent call last):
    ImportError: PyTorch does not have the operators aten._softmax.quick, on which koila relies
      try: a release of PyTorch that koila supports, unchanged
    """
    missing = [f"aten.{name}" for name in sorted(names) if not _exists(name)]
    if missing:
        fact = f"PyTorch does not have the operators {', '.join(missing)}, on which koila relies"
        raise ImportError(compose_message(fact, hint="a release of PyTorch that koila supports, unchanged"))


def _exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    return hasattr(getattr(torch.ops.aten, packet, None), overload)


check_operators(PRIVATE_OPERATORS)
