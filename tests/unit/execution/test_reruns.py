"""Programs that may run again are told of writes to their leaves, at little cost for each write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import koila
from koila.errors import StaleInputError
from koila.execution import attach


def test_a_write_does_not_look_at_every_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    asked: list[object] = []
    address_of = attach.address_of
    monkeypatch.setattr(attach, "address_of", lambda leaf: asked.append(leaf) or address_of(leaf))
    with koila.budget(chunk_size=2):
        loss = model(koila.lazy(torch.randn(6, 4))).square().mean()
        value = loss.run()
    assert value.requires_grad and len(asked) == len(set(map(id, asked))), "each leaf once"
    asked.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert not asked
    with pytest.raises((RuntimeError, StaleInputError), match=r"modified|changed"):
        value.backward()
