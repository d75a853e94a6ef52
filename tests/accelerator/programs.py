"""Programs of kinds that people train, small, in plain PyTorch; nothing here knows koila or the device.

*Takes* a name. *Gives* a `Program`: a model, a batch, and the loss. The same name gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import language, vision

BATCH = 12


@dataclass(frozen=True)
class Program:
    """What is trained."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    loss: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]

    def to(self, device: str) -> Program:
        return Program(self.model.to(device), tuple(each.to(device) for each in self.inputs), self.loss)


def _gpt(dropout: float, dtype: torch.dtype = torch.float64) -> Program:
    task = language(BATCH, dtype, width=32, context=16, dropout=dropout)
    return Program(task.model, task.batches[0], lambda model, batch: task.loss(model(batch[0]), batch))


def _cnn(dropout: float = 0.2) -> Program:
    task = vision(BATCH, torch.float64, channels=8, dropout=dropout)
    return Program(task.model, task.batches[0], lambda model, batch: task.loss(model(batch[0]), batch))


class _Attention(nn.Module):
    """PyTorch's own attention between two linear layers."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.into, self.out = dropout, nn.Linear(width, 3 * width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*parts, dropout_p=self.dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _classes(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _squares(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    result = model(batch[0])
    return (result[0] if isinstance(result, tuple) else result).square().mean()


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _mlp() -> Program:
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)]
    batch = 40 * BATCH
    return Program(nn.Sequential(*layers), (_normal(batch, 16), torch.randint(5, (batch,))), _classes)


def _pairs(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A contrastive loss: every sample against every other one."""
    first, second = (F.normalize(model(each), dim=-1) for each in batch)
    return F.cross_entropy(first @ second.t() / 0.1, torch.arange(len(first), device=first.device))


def _contrastive() -> Program:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    return Program(model, (_normal(BATCH, 16), _normal(BATCH, 16)), _pairs)


_PROGRAMS: dict[str, Callable[[], Program]] = {
    "mlp": _mlp,
    "gpt": lambda: _gpt(0.0),
    "gpt with dropout": lambda: _gpt(0.1),
    "cnn": _cnn,
    "attention": lambda: Program(_Attention(), (_normal(BATCH, 16, 32),), _squares),
    "attention with dropout": lambda: Program(_Attention(dropout=0.2), (_normal(BATCH, 16, 32),), _squares),
    "lstm": lambda: Program(nn.LSTM(8, 16, 2, batch_first=True), (_normal(BATCH, 6, 8),), _squares),
    "gru": lambda: Program(nn.GRU(8, 16, 2, batch_first=True), (_normal(BATCH, 6, 8),), _squares),
    "contrastive": _contrastive,
}
NAMES = tuple(_PROGRAMS)


def program(name: str, dtype: torch.dtype = torch.float64) -> Program:
    """The program of that name, on the host."""
    torch.manual_seed(0)
    made = _PROGRAMS[name]()
    inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in made.inputs)
    return Program(made.model.to(dtype), inputs, made.loss)
