"""The two programs of the first landing, in plain PyTorch: nothing here knows koila.

*Takes* sizes. *Gives* `GPT` and `CNN`, their losses and accuracies, and data made from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, ...]


class Attention(nn.Module):
    """Causal self-attention, with dropout on the probabilities and on the result."""

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        # No bias: the gradient of the key's is zero, and AdamW would make steps of its rounding.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(~self.causal[:length, :length], float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.dropout(self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width)))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm."""

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, dropout)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A decoder whose head shares its weight with the embedding."""

    def __init__(
        self,
        vocabulary: int = 31,
        context: int = 8,
        width: int = 16,
        heads: int = 2,
        layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CNN(nn.Module):
    """Convolutions with train-mode batch normalisation and dropout, then a linear classifier."""

    def __init__(self, channels: int = 6, layers: int = 3, classes: int = 5, dropout: float = 0.2) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for number in range(layers):
            blocks += [
                # No bias: batch normalisation takes it away again, so its gradient is nothing but rounding.
                nn.Conv2d(3 if number == 0 else channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            ]
        self.features = nn.Sequential(*blocks, nn.MaxPool2d(2), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(2))
        self.classifier = nn.Linear(4 * channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Task:
    """A model, its data, its loss and the number of right answers."""

    model: nn.Module
    batches: list[Batch]

    def logits(self, batch: Batch) -> torch.Tensor:
        return self.model(batch[0])

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def correct(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


class Language(Task):
    """Next tokens, with a mean over the positions that are not padding."""

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        _, targets, mask = batch
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    def correct(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        _, targets, mask = batch
        return ((logits.argmax(-1) == targets) & (mask > 0)).sum()


class Vision(Task):
    """Classes of images."""

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(logits, batch[1])

    def correct(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return (logits.argmax(1) == batch[1]).sum()


def language(
    batch: int, dtype: torch.dtype, steps: int = 1, context: int = 8, vocabulary: int = 31, **sizes: Any
) -> Language:
    """A GPT and batches that count up in steps of one to three; the second sample of each is nothing but padding."""
    torch.manual_seed(0)
    model = GPT(vocabulary, context, **sizes).to(dtype)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        start, stride = torch.randint(0, vocabulary, (2, batch, 1), generator=generator)
        tokens = (start + (1 + stride % 3) * torch.arange(context + 1)) % vocabulary
        lengths = torch.randint(1, context + 1, (batch,), generator=generator)
        lengths[1 % batch] = 0
        mask = (torch.arange(context) < lengths[:, None]).to(dtype)
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask))
    return Language(model, batches)


def vision(batch: int, dtype: torch.dtype, steps: int = 1, size: int = 8, classes: int = 5, **sizes: Any) -> Vision:
    """A CNN and noisy images, one pattern for each class."""
    torch.manual_seed(0)
    model = CNN(classes=classes, **sizes).to(dtype)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, 3, size, size, generator=generator, dtype=torch.float64)
    batches: list[Batch] = []
    for _ in range(steps):
        labels = torch.randint(0, classes, (batch,), generator=generator)
        noise = torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)
        batches.append(((patterns[labels] + noise).to(dtype), labels))
    return Vision(model, batches)
