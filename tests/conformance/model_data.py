"""Random data for small models: text, images, speech, series.

*Takes* a batch size. *Gives* the keyword arguments of a model's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Inputs = dict[str, Any]
VOCABULARY, LENGTH = 29, 7


def _ids(batch: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _mask(batch: int, length: int = LENGTH) -> torch.Tensor:
    """Padded at the right: rows of different lengths."""
    lengths = torch.arange(batch) % 3
    return (torch.arange(length) < (length - lengths).unsqueeze(1)).long()


def text(batch: int) -> Inputs:
    """Tokens with padding; padded labels are ignored."""
    ids, mask = _ids(batch), _mask(batch)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unmasked_text(batch: int) -> Inputs:
    ids = _ids(batch)
    return {"input_ids": ids, "labels": ids.clone()}


def classified_text(batch: int) -> Inputs:
    return {"input_ids": _ids(batch), "attention_mask": _mask(batch), "labels": torch.arange(batch) % 3}


def question(batch: int) -> Inputs:
    spans = {"start_positions": torch.arange(batch) % 3, "end_positions": 3 + torch.arange(batch) % 2}
    return {"input_ids": _ids(batch), "attention_mask": _mask(batch), **spans}


def pairs(batch: int) -> Inputs:
    """Source and target of a sequence-to-sequence model."""
    return {"input_ids": _ids(batch), "attention_mask": _mask(batch), "labels": _ids(batch, 5)}


def image(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.arange(batch) % 3}


def segmented(size: int, labels: int) -> Callable[[int], Inputs]:
    return lambda batch: {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, 3, (batch, labels, labels)),
    }


def pixels(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def wave(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 400), "labels": torch.arange(batch) % 3}


def spoken(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 400), "labels": torch.randint(1, 12, (batch, 3))}


def spectrogram(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 8, 20), "labels": _ids(batch, 5)}


def spectra(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 16, 8), "labels": torch.arange(batch) % 3}


def captioned(size: int) -> Callable[[int], Inputs]:
    return lambda batch: {
        "input_ids": _ids(batch),
        "attention_mask": _mask(batch),
        "pixel_values": torch.randn(batch, 3, size, size),
    }


def series(batch: int) -> Inputs:
    return {
        "past_values": torch.rand(batch, 15),
        "past_time_features": torch.randn(batch, 15, 1),
        "past_observed_mask": torch.ones(batch, 15),
        "future_values": torch.rand(batch, 4),
        "future_time_features": torch.randn(batch, 4, 1),
    }


def patches(batch: int) -> Inputs:
    return {"past_values": torch.randn(batch, 16, 2), "future_values": torch.randn(batch, 4, 2)}


def pictured(batch: int) -> Inputs:
    """Four tokens of a picture, then text."""
    ids = torch.cat([torch.full((batch, 4), 2), _ids(batch)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(),
            "pixel_values": torch.randn(batch, 3, 8, 8)}  # fmt: skip


def asked(batch: int) -> Inputs:
    """A question about a picture, with a score for each answer."""
    return {**captioned(8)(batch), "labels": torch.rand(batch, 3)}


def matched(batch: int) -> Inputs:
    """Pictures and their captions, for a contrastive loss over the batch."""
    return {**captioned(8)(batch), "return_loss": True}


# Losses of models that have none of their own here.


def squares(*names: str) -> Callable[[Any], Any]:
    """The mean square of some results."""

    def loss(outputs: Any) -> Any:
        total = outputs[names[0]].square().mean()
        for name in names[1:]:
            total = total + outputs[name].square().mean()
        return total

    return loss
