"""Measures the rates of `koila.planning.cost` on this machine: `python -m benchmarks.costs`.

*Takes* nothing. *Gives* a table: for each kind of kernel the rate that the planner counts on and the one measured, the
best of several tries. Only ratios between kinds decide between plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from koila.planning.devices import CPU
from koila.planning.rates import BYTES, FLOPS, FRESH, LARGE

aten = torch.ops.aten


def best_seconds(function: Callable[[], object], tries: int = 7) -> float:
    """The best time of a call."""
    function()
    best = float("inf")
    for _ in range(tries):
        started, calls = time.perf_counter(), 0
        while time.perf_counter() - started < 0.02:
            function()
            calls += 1
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def flops_per_second() -> dict[str, float]:
    """Dense kernels at sizes of a chunk."""
    a, b = torch.randn(256, 256), torch.randn(256, 1024)
    x, weight = torch.randn(4, 64, 24, 24), torch.randn(64, 64, 3, 3)
    q, k, v = (torch.randn(2, 8, 256, 32) for _ in range(3))
    return {
        "": 2 * 256 * 256 * 1024 / best_seconds(lambda: a @ b),
        "convolution": 2 * 4 * 24 * 24 * 64 * 64 * 9 / best_seconds(lambda: F.conv2d(x, weight, padding=1)),
        "attention": 4 * 2 * 8 * 256 * 256 * 32 / best_seconds(lambda: F.scaled_dot_product_attention(q, k, v)),
    }


def bytes_per_second() -> dict[str, float]:
    """Kernels that move data, at sizes of a chunk: bytes read and written."""
    x, y = torch.randn(16, 64, 24, 24), torch.randn(16, 64, 24, 24)
    rows = torch.randn(256, 2048)
    order = torch.randperm(256)
    scale, shift = torch.randn(64), torch.randn(64)
    size = 4 * x.numel()
    return {
        "plain": 3 * size / best_seconds(lambda: x + y),
        "slow": 2 * size / best_seconds(x.exp),
        "softmax": 8 * rows.numel() / best_seconds(lambda: rows.log_softmax(-1)),
        "norm": 8 * rows.numel() / best_seconds(lambda: F.layer_norm(rows, (2048,))),
        "batch_norm": 2 * size / best_seconds(lambda: F.batch_norm(x, None, None, scale, shift, training=True)),
        "pool": 1.75 * size / best_seconds(lambda: F.max_pool2d(x, 2, return_indices=True)),
        "indices_backward": 3.5 * size / best_seconds(_pool_backward(x)),
        "var": size / best_seconds(lambda: torch.var_mean(x, (0, 2, 3))),
        "std": size / best_seconds(lambda: x.std((0, 2, 3))),
        "upsample": 5 * size / best_seconds(lambda: F.interpolate(x, scale_factor=2, mode="bilinear")),
        "cum": 2 * size / best_seconds(lambda: x.cumsum(0)),
        "sort": 4 * size / best_seconds(lambda: x.sort(-1)),
        "topk": 1.75 * size / best_seconds(lambda: x.topk(6)),
        "argm": size / best_seconds(lambda: x.argmax(1)),
        "": 8 * rows.numel() / best_seconds(lambda: rows[order]),
    }


def _pool_backward(x: torch.Tensor) -> Callable[[], object]:
    found, places = F.max_pool2d(x, 2, return_indices=True)
    given = ([2, 2], [2, 2], [0, 0], [1, 1], False, places)
    return lambda: aten.max_pool2d_with_indices_backward.default(found, x, *given)


def main() -> None:
    torch.set_num_threads(1)
    print("| kind | counted | measured |\n|---|---|---|")
    with torch.no_grad():
        for kind, rate in flops_per_second().items():
            print(f"| GFLOP/s, {kind or 'matrix products'} | {FLOPS[kind] / 1e9:.0f} | {rate / 1e9:.0f} |")
        for kind, rate in bytes_per_second().items():
            print(f"| GB/s, {kind or 'others'} | {BYTES[kind] / 1e9:g} | {rate / 1e9:.1f} |")
        fresh = best_seconds(lambda: torch.empty(LARGE, dtype=torch.uint8).fill_(1))
        print(f"| GB/s of new pages | {FRESH / 1e9:.1f} | {LARGE / fresh / 1e9:.1f} |")
        one = torch.ones(1)
        found = best_seconds(lambda: aten.add.Tensor(one, one))
        print(f"| µs per call | {CPU.call_seconds * 1e6:.0f} | {1e6 * found:.1f} |")


if __name__ == "__main__":
    main()
