"""The fused layers of transformers as the operators that they stand for: each of these can be cut along the batch.

*Takes* the arguments of the fused operators that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call without
gradients, and of the gradients of attention with dropout on an accelerator. *Gives* the same values from products, a
softmax and norms. An unsplit run keeps the fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from koila._torch import OpOverload
from koila.ir.attention import attended_backward


def native_multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention with several heads, and its weights if they are asked for."""
    size = embed_dim // num_head
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    heads = [F.linear(part, *own).unflatten(-1, (num_head, size)).transpose(1, 2) for part, *own in parts]
    scores = (heads[0] / math.sqrt(size)) @ heads[1].transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_for_each_head(mask, mask_type), -math.inf)
    weights = torch.softmax(scores, -1)
    attended = F.linear((weights @ heads[2]).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return attended, None
    return attended, weights.mean(1) if average_attn_weights else weights


def _for_each_head(mask: Tensor, mask_type: int | None) -> Tensor:
    """The mask over samples, heads, queries and keys; the fused kernels read any mask as one of bool.

    PyTorch's types: 0 is a mask of queries and keys, 1 one of samples and keys, 2 has all four dimensions.
    """
    found = mask.to(torch.bool)
    return found[:, None, None, :] if mask_type == 1 else found


def transformer_encoder_layer_fwd(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """A layer of a transformer's encoder: attention and a network of two layers, each with a norm before or after."""

    def attend(x: Tensor) -> Tensor:
        found, _ = native_multi_head_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )
        return found

    def feed(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed(x), norm_weight_2, norm_bias_2)


def backward_with_mask(operator: OpOverload) -> Callable[..., Any]:
    """The gradients of a device's attention, if its mask is known; see `koila.ir.attention`."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return attended_backward(operator, args, kwargs)

    return decomposed
