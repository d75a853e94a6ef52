"""Attention with dropout as one operator, which draws its mask inside of the kernel: what accelerators use.

*Takes* the arguments of such an operator, or their layouts. *Gives* the mask alone, drawn by the operator itself, and
the result that attention has with a mask, by formulas. A kernel tells its mask if every score is zero: all keys then
have the same weight, and with values that are powers of two each element of the result is the sum of the keys that were
kept. Whether the operator uses this mask for other inputs, too, a self-test on the device at hand finds out. Where
it does not, it runs at once, as anything does whose random numbers depend on data. Drawing takes about seven times the
bytes of the queries for a moment.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from koila._torch import OpOverload, schema_of, without_modes
from koila.ir.generators import GeneratorState
from koila.ir.prepass import PrePass

aten = torch.ops.aten

OPERATORS: dict[OpOverload, OpOverload] = {
    getattr(aten, name).default: getattr(aten, f"{name}_backward").default
    for name in (
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
    )
}  # fmt: skip
"""The operators of devices, each with that of its gradients."""

_OTHERS: dict[OpOverload, dict[str, Any]] = {
    aten._scaled_dot_product_efficient_attention.default: {"attn_bias": None, "compute_log_sumexp": True},
    aten._scaled_dot_product_cudnn_attention.default: {"attn_bias": None, "compute_log_sumexp": True},
}
"""Arguments that some of them must be given."""

_NUM_KEYS = {torch.float64: 20, torch.float32: 6, torch.float16: 4, torch.bfloat16: 4}
"""By type, how many keys one element of a result can count: TF32 and bfloat16 round the weight of each key alike."""

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a kernel may be from the formula in the self-test; another mask is many times farther."""

_LENGTH = 32
"""Queries and keys in the self-test."""


def bound(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name."""
    names = schema_of(func).arguments
    given = {each.name: each.default_value for each in names}
    return {**given, **dict(zip(given, args, strict=False)), **kwargs}


def draws_mask(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is attention that draws random numbers."""
    return func in OPERATORS and bool(bound(func, args, kwargs)["dropout_p"])


# The mask.


def attention_mask(func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    """Draw the mask of a call: true for each query and key that is kept. Of its tensors only the sizes matter."""
    given = bound(func, args, kwargs)
    query, key, value = (_zeros(given[name]) for name in ("query", "key", "value"))
    per_element, num_keys = _NUM_KEYS[query.dtype], key.shape[-2]
    mask = torch.empty(*query.shape[:3], num_keys, dtype=torch.bool, device=query.device)
    generator = GeneratorState(query.device)
    begun = generator.read()
    for first in range(0, num_keys, per_element * value.shape[-1]):
        part = mask[..., first : first + per_element * value.shape[-1]]
        value.copy_(_weights(value, first, part.shape[-1]))
        generator.write(begun)
        result = _called(func, given, query, key, value)[0]
        counted = result.mul_(num_keys * (1 - given["dropout_p"])).round_().to(torch.int32)
        for place in range(min(per_element, part.shape[-1])):
            kept = part[..., place::per_element]
            kept.copy_(counted[..., : kept.shape[-1]].bitwise_and(1))
            counted.bitwise_right_shift_(1)
    return mask


def _zeros(like: PrePass | Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _weights(value: Tensor, first: int, number: int) -> Tensor:
    """Values by which an element of the result counts some keys: 1, 2, 4, …, and the next ones in the next element."""
    keys, per_element = torch.arange(number, device=value.device), _NUM_KEYS[value.dtype]
    weights = torch.zeros(value.shape[-2:], dtype=value.dtype, device=value.device)
    weights[first + keys, keys // per_element] = (2.0 ** (keys % per_element)).to(value.dtype)
    return weights


def _called(func: OpOverload, given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Any:
    """The operator on other tensors; every query sees every key."""
    changed = {**given, "query": query, "key": key, "value": value, "is_causal": False}
    if "attn_bias" in given:
        changed["attn_bias"] = None
    return func(**changed)


# The result with a mask.


def attended(func: OpOverload, args: Any, kwargs: Any, mask: Tensor) -> tuple[Any, ...]:
    """What the operator gives with this mask, by formulas; the mask stands where the seed is, for the gradients."""
    given = bound(func, args, kwargs)
    names = [each.name for each in schema_of(func).returns]
    _, _, value = parts = _parts(given)
    scores = _scores(given, *parts[:2])
    result = (torch.softmax(scores, -1) * _kept(given, mask)) @ value
    found = {
        names[0]: _laid_out(func, result.to(given["query"].dtype), given["query"]),
        names[1]: torch.logsumexp(scores, -1),
        ("rng_state" if "rng_state" in names else "philox_seed"): mask,
        "max_q": given["query"].shape[-2],
        "max_k": given["key"].shape[-2],
    }
    return tuple(found.get(name, mask.new_empty(0)) for name in names)


def attended_backward(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """The gradients of attention whose seed is a mask; NotImplemented if it is none."""
    given = bound(func, args, kwargs)
    mask = given["philox_seed"]
    if mask.dtype != torch.bool:
        return NotImplemented
    query, key, value = _parts(given)
    grad, scale = args[0].to(query.dtype), _scale(given)
    weights, kept = torch.softmax(_scores(given, query, key), -1), _kept(given, mask)
    by_weight = (grad @ value.transpose(-2, -1)) * kept
    by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdim=True))
    by_key = _ungrouped((by_score.transpose(-2, -1) @ query) * scale, given["key"])
    by_value = _ungrouped((weights * kept).transpose(-2, -1) @ grad, given["value"])
    found = ((by_score @ key) * scale, by_key, by_value, by_score)[: len(schema_of(func).returns)]
    return tuple(each.to(given["query"].dtype) for each in found)


def _scale(given: dict[str, Any]) -> float:
    scale = given["scale"]
    return 1 / math.sqrt(given["query"].shape[-1]) if scale is None else float(scale)


def _parts(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, with a head of keys and values for each head of queries; in float32 at least."""
    query = given["query"]
    dtype, heads = torch.promote_types(query.dtype, torch.float32), query.shape[1]
    query, key, value = (given[name].to(dtype) for name in ("query", "key", "value"))
    return query, _grouped(key, heads), _grouped(value, heads)


def _grouped(given: Tensor, num_heads: int) -> Tensor:
    """A head of queries each, where several of them share one of keys and values."""
    own = given.shape[1]
    return given if own == num_heads else given.unsqueeze(2).expand(-1, -1, num_heads // own, -1, -1).flatten(1, 2)


def _ungrouped(grad: Tensor, given: Tensor) -> Tensor:
    """The gradients of heads that were shared."""
    own = given.shape[1]
    return grad if own == grad.shape[1] else grad.unflatten(1, (own, grad.shape[1] // own)).sum(2)


def _scores(given: dict[str, Any], query: Tensor, key: Tensor) -> Tensor:
    """The scores of all queries and keys."""
    bias = given.get("attn_bias")
    scores = (query @ key.transpose(-2, -1)) * _scale(given)
    if bias is not None:
        scores = scores + bias
    if given["is_causal"]:
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(earlier.logical_not(), -math.inf)
    return scores


def _kept(given: dict[str, Any], mask: Tensor) -> Tensor:
    dtype = torch.promote_types(given["query"].dtype, torch.float32)
    return mask.to(dtype) * (1 / (1 - given["dropout_p"]))


def _laid_out(func: OpOverload, result: Tensor, query: Tensor) -> Tensor:
    """The result in the order of memory in which the operator gives it: its own, or that of the queries."""
    is_fixed = func is aten._scaled_dot_product_efficient_attention.default
    if not is_fixed and query.stride(1) >= query.stride(2):
        return result
    return result.transpose(1, 2).contiguous().transpose(1, 2)


# The self-test.


def is_known(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether the operator of a device tells the mask that it will use for such arguments."""
    given = bound(func, args, kwargs)
    query: Tensor = given["query"]
    if query.dtype not in _NUM_KEYS or query.ndim != 4 or not given["dropout_p"] < 1:
        return False
    num_heads, num_shared = query.shape[1], given["key"].shape[1]
    if given["value"].shape[1] != num_shared or num_heads % num_shared:
        return False
    sizes = num_heads // num_shared, query.shape[-1], given["value"].shape[-1]
    choice = given["dropout_p"], given["is_causal"], given.get("attn_bias") is not None
    return query.is_meta or _tells_its_mask(func, query.dtype, query.device, sizes, choice)


@cache
def _tells_its_mask(
    func: OpOverload, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...], choice: tuple[float, bool, bool]
) -> bool:
    """Self-test: with the mask that a kernel tells, the formula gives the kernel's result; both draw equally much."""
    num_heads, width, value_width = sizes
    generator = GeneratorState(device)
    with without_modes(), torch.no_grad(), generator.restored():
        shapes = (2, _LENGTH, num_heads, width), (2, _LENGTH, 1, width), (2, _LENGTH, 1, value_width)
        parts = [_spread(shape, dtype, device, step).transpose(1, 2) for step, shape in enumerate(shapes, 1)]
        given: dict[str, Any] = {"dropout_p": choice[0], "is_causal": choice[1], **_OTHERS.get(func, {})}
        if choice[2]:
            given["attn_bias"] = _spread((2, num_heads, _LENGTH, _LENGTH), dtype, device, 4)
        begun = generator.read()
        expected = func(*parts, **given)[0]
        after = generator.read()
        generator.write(begun)
        found = attended(func, parts, given, attention_mask(func, parts, given))[0]
        is_near = (found - expected).norm() <= _TOLERANCES[dtype] * expected.norm()
        return bool(is_near) and torch.equal(generator.read(), after)


def _spread(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, step: int) -> Tensor:
    """Numbers without a pattern that a mask could hide in."""
    return torch.arange(1, 1 + math.prod(shape), device=device).mul(step).sin().mul(2).to(dtype).view(shape)
