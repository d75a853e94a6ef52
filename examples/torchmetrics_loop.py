"""For whoever counts with torchmetrics: metrics take lazy predictions as they take others.

`update` reads the batch, so it runs what the metric needs; inside a budget in chunks. Run it with
`python examples/torchmetrics_loop.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

import koila

BUDGET = "46KiB"


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(11, 16, generator=generator, dtype=torch.float64), torch.randint(0, 4, (11,), generator=generator))
        for _ in range(4)
    ]


def train(use_koila: bool = True, budget: object = BUDGET) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accuracy, confusion = MulticlassAccuracy(num_classes=4), MulticlassConfusionMatrix(num_classes=4)
    for x, y in koila.loader(batches(), budget=budget) if use_koila else batches():
        optimizer.zero_grad()
        logits = net(x)
        F.cross_entropy(logits, y).backward()
        accuracy.update(logits.detach(), y)
        confusion.update(logits.detach(), y)
        optimizer.step()
    return {**net.state_dict(), "accuracy": accuracy.compute().double(), "confusion": confusion.compute().double()}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
