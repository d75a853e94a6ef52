"""For whoever writes the loop: `koila.loader` around the DataLoader, everything else as it was.

Run it with `python examples/plain_loop.py`: it trains a CNN with BatchNorm and dropout twice, plainly and inside a byte
budget, and prints how far the weights are apart. Only the line with `koila.loader` differs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import koila

BUDGET = "120KiB"


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(36, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(0, 5, (36,), generator=generator))


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(128, 5),
    ).double()  # fmt: skip


def train(use_koila: bool = True, budget: object = BUDGET) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(1))
    batches = koila.loader(loader, budget=budget) if use_koila else loader
    correct = 0
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            correct += (logits.argmax(1) == y).sum().item()
    return {**net.state_dict(), "loss": loss.detach(), "correct": torch.tensor(correct)}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
