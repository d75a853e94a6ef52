"""Attention on the CPU: each thread works on a block of queries and keys.

Measured, but for `_packed`, which is by reading PyTorch's kernel. `_products` is a bound over what was measured with
AVX-512 at two threads, which are seldom at their peaks together.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.planning.workspace.kernel_call import HALF, Formula, KernelCall, num_bytes

aten = torch.ops.aten


def _blocks(call: KernelCall) -> tuple[int, int, int]:
    """Queries and keys of the block that a thread works on, and the size of a head."""
    query, key = call["query"], call["key"]
    queries = query.shape[2]
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(block, queries), min(512, key.shape[2]), query.shape[3]


def _attention(call: KernelCall) -> int:
    queries, keys, head = _blocks(call)
    half = 2 * queries * keys if call["query"].dtype in HALF else 0
    return call.num_threads * (4 * queries * (keys + 2 + head) + half) + (8 << 10) + _packed(call)


def _packed(call: KernelCall) -> int:
    """Half precision that the processor computes itself: keys and values in blocks of 64, heads padded to them."""
    if call["query"].dtype not in call.processor.native:
        return 0
    queries, keys, head = _blocks(call)
    samples, heads, num_keys = call["key"].shape[:3]
    wide = -(-head // 64) * 64
    packed = 2 * samples * max(heads, call["query"].shape[1]) * wide * 2 * (num_keys + 512 + 64)
    return int(packed + call.num_threads * (4 * queries * 128 + 2 * (queries + 64) * wide + 128 * (keys + 1)))


def _attention_backward(call: KernelCall) -> int:
    queries, keys, head = _blocks(call)
    half = 4 * (queries * keys + keys * head) if call["query"].dtype in HALF else 0
    return num_bytes(call["query"]) + call.num_threads * (8 * queries * keys + half + _products(call)) + (8 << 10)


def _products(call: KernelCall) -> int:
    """What a thread needs for products of half precision that the processor computes itself."""
    if call["query"].dtype not in call.processor.native:
        return 0
    queries, keys, head = _blocks(call)
    return int(8 * keys * head + 16 * queries * head + queries * keys) + (80 << 10)


ROWS: dict[Any, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
