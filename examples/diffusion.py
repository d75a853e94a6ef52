"""For whoever trains denoisers: noise and time steps drawn inside the step are those of the whole batch.

What koila gives here: the batch that the schedule was tuned for, with eager's noise (drawn once, whole, and cut with
the batch), and an average of the weights (EMA) that sees the same weights. What it does not give: sampling. A sampler
goes through the network a thousand times without gradients, so its memory is that of one pass; a smaller batch of
samples does as well there. Run it with `python examples/diffusion.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import koila

BUDGET = "300KiB"
NUM_TIMES = 100


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(NUM_TIMES, 8)
        self.into, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.into(noisy) + self.time(time)[:, :, None, None]
        return self.out(F.silu(self.norm(hidden)))


def train(use_koila: bool = True, budget: object = BUDGET) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = Denoiser().double()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    kept = torch.linspace(0.99, 0.01, NUM_TIMES, dtype=torch.float64)
    for _ in range(3):
        images = torch.randn(12, 1, 8, 8, dtype=torch.float64)
        if use_koila:
            images = koila.lazy(images, budget=budget)
        time = torch.randint(0, NUM_TIMES, (images.shape[0],))
        noise, share = torch.randn_like(images), kept[time][:, None, None, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        loss = F.mse_loss(net(noisy, time), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(net)
    return {**averaged.state_dict(), "loss": loss.detach()}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
