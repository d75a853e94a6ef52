"""For whoever trains with Accelerate: `koila.loader` around what `accelerator.prepare` returned.

Batches are made lazy after Accelerate has put them on their device. Accumulation, clipping and `gather_for_metrics`
stay as they are. Run it with `python examples/accelerate_loop.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import koila

BUDGET = "46KiB"


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, 16, generator=generator, dtype=torch.float64),
                         torch.randint(0, 4, (40,), generator=generator))  # fmt: skip


def train(use_koila: bool = True, budget: object = BUDGET) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data(), batch_size=10))
    batches = koila.loader(loader, budget=budget) if use_koila else loader
    seen = []
    for x, y in batches:
        with accelerator.accumulate(net):
            logits = net(x)
            accelerator.backward(F.cross_entropy(logits, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.gather_for_metrics((logits.argmax(1) == y).double().mean()))
    return {**net.state_dict(), "accuracy": torch.stack(list(seen)).mean()}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
