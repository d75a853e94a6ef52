"""Recurrent nets, attention with every form of mask, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.exactness.cases import Case, Sizes, check, table, verify

RECURRENT = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
RECURRENT_OPTIONS: dict[str, dict[str, Any]] = {
    "batch first": {"batch_first": True},
    "two layers, both ways": {"batch_first": True, "num_layers": 2, "bidirectional": True},
    "dropout": {"batch_first": True, "num_layers": 2, "dropout": 0.4},
}


@pytest.mark.parametrize("options", RECURRENT_OPTIONS)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent(kind: str, options: str) -> None:
    check(
        lambda net, x: net(x)[0],
        lambda s: s.x(s.B, s.T, s.D),
        lambda s: RECURRENT[kind](s.D, s.C, **RECURRENT_OPTIONS[options]),
        chunks=(1, 3, 7) if options == "batch first" else (1, 3),
    )


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_time_first_with_state(kind: str) -> None:
    def program(net: nn.Module, x: torch.Tensor, h: torch.Tensor) -> Any:
        return net(x, (h, h.cos()) if kind == "LSTM" else h)

    check(
        program,
        lambda s: (s.x(s.T, s.B, s.D), s.x(1, s.B, s.C)),
        lambda s: RECURRENT[kind](s.D, s.C),
        batch=(1, 1),
        chunks=(1, 3, 7),
    )


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_cell_in_a_loop(kind: str) -> None:
    cells = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}

    def program(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x.unbind(1):
            state = net(step, state)
        return state[0] if kind == "LSTM" else state

    check(program, lambda s: s.x(s.B, s.T, s.D), lambda s: cells[kind](s.D, s.C))


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_packed(kind: str) -> None:
    def program(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(x.shape[0], device="cpu") % x.shape[1] + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(net(packed)[0], batch_first=True)[0]

    check(
        program,
        lambda s: s.x(s.B, s.T, s.D),
        lambda s: RECURRENT[kind](s.D, s.C, batch_first=True),
        chunks=(1, 7),
        whole="packed sequences may run whole",
    )


def _heads(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, 2, s.T, s.D), s.x(s.B, 2, s.H, s.D), s.x(s.B, 2, s.H, s.D)


def _square_heads(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, 2, s.T, s.D), s.x(s.B, 2, s.T, s.D), s.x(s.B, 2, s.T, s.D)


def _keep_first(mask: torch.Tensor) -> torch.Tensor:
    mask[..., 0] = True
    return mask


def _masked(*shape: str) -> Callable[[Sizes], tuple[torch.Tensor, ...]]:
    def make(s: Sizes) -> tuple[torch.Tensor, ...]:
        sizes = [int(size) if size.isdigit() else getattr(s, size) for size in shape]
        return (*_heads(s), _keep_first(s.mask(*sizes)))

    return make


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


SHARED = {"batch": (0, 0, 0, None)}


@table(
    Case("no mask", _attend, _heads),
    Case("causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _square_heads),
    Case("scale", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), _heads),
    Case("dropout", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4), _heads),
    Case("boolean mask, shared", _attend, _masked("T", "H"), options=SHARED),
    Case("boolean mask, shared, four dims", _attend, _masked("1", "1", "T", "H"), options=SHARED),
    Case("boolean mask per sample", _attend, _masked("B", "1", "T", "H")),
    Case("boolean mask per sample and head", _attend, _masked("B", "2", "T", "H")),
    Case("boolean mask per key", _attend, _masked("B", "1", "1", "H")),
    Case("boolean mask per head", _attend, _masked("2", "T", "H"), options=SHARED),
    Case("boolean mask from padding", lambda q, k, v, m: _attend(q, k, v, m[:, None, None, :]), _masked("B", "H")),
    Case("float mask, shared", _attend, lambda s: (*_heads(s), s.x(s.T, s.H)), options=SHARED),
    Case("float mask per sample", _attend, lambda s: (*_heads(s), s.x(s.B, 1, s.T, s.H))),
    Case(
        "float mask of infinities",
        lambda q, k, v, m: _attend(q, k, v, torch.zeros(m.shape, dtype=q.dtype).masked_fill(~m, float("-inf"))),
        _masked("B", "1", "T", "H"),
    ),
    Case(
        "samples with nothing to attend to",
        lambda q, k, v, m: _attend(q, k, v, m & (torch.arange(m.shape[0]) != 1)[:, None, None, None]),
        _masked("B", "1", "T", "H"),
    ),
    Case(
        "grouped queries",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda s: (s.x(s.B, 4, s.T, s.D), s.x(s.B, 2, s.H, s.D), s.x(s.B, 2, s.H, s.D)),
    ),
    Case("three dims", _attend, lambda s: (s.x(s.B, s.T, s.D), s.x(s.B, s.H, s.D), s.x(s.B, s.H, s.D))),
    Case(
        "heads in front of the batch",
        _attend,
        lambda s: (s.x(2, s.B, s.T, s.D), s.x(2, s.B, s.H, s.D), s.x(2, s.B, s.H, s.D)),
        options={"batch": 1},
    ),
    Case("by hand", lambda q, k, v: ((q @ k.transpose(-2, -1)) / 2).softmax(-1) @ v, _heads),
    Case(
        "by hand, masked_fill",
        lambda q, k, v, m: (q @ k.mT).masked_fill(~m, float("-inf")).softmax(-1) @ v,
        _masked("B", "1", "T", "H"),
    ),
    Case(
        "by hand, bmm over batch and heads",
        lambda q, k, v: torch.bmm(
            torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).softmax(2), v.flatten(0, 1)
        ).view(q.shape),
        _heads,
    ),
    Case(
        "by hand, einsum",
        lambda q, k, v: torch.einsum("bhqk,bhkd->bqhd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
        _heads,
    ),
)
def test_attention(case: Case) -> None:
    verify(case)


def _attention(**options: Any) -> Callable[[Sizes], nn.Module]:
    return lambda s: nn.MultiheadAttention(s.D, 2, **options)


def _sequence(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.T, s.D)


def _with_padding(s: Sizes) -> tuple[torch.Tensor, ...]:
    return _sequence(s), ~_keep_first(s.mask(s.B, s.T))


def _causal(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[dim], dtype=torch.float64)


@table(
    Case("MultiheadAttention", lambda net, x: net(x, x, x)[0], _sequence, _attention(batch_first=True)),
    Case(
        "MultiheadAttention weights",
        lambda net, x: net(x, x, x, average_attn_weights=False),
        _sequence,
        _attention(batch_first=True),
    ),
    Case(
        "MultiheadAttention without weights",
        lambda net, x: net(x, x, x, need_weights=False)[0],
        _sequence,
        _attention(batch_first=True, dropout=0.3),
    ),
    Case(
        "MultiheadAttention time first",
        lambda net, x: net(x, x, x)[0],
        lambda s: s.x(s.T, s.B, s.D),
        _attention(),
        options={"batch": 1},
    ),
    Case(
        "MultiheadAttention padding",
        lambda net, x, m: net(x, x, x, key_padding_mask=m)[0],
        _with_padding,
        _attention(batch_first=True),
    ),
    Case(
        "MultiheadAttention padding, no weights",
        lambda net, x, m: net(x, x, x, key_padding_mask=m, need_weights=False)[0],
        _with_padding,
        _attention(batch_first=True),
    ),
    Case(
        "MultiheadAttention causal",
        lambda net, x: net(x, x, x, attn_mask=_causal(x), is_causal=True, need_weights=False)[0],
        _sequence,
        _attention(batch_first=True),
    ),
    Case(
        "MultiheadAttention mask per sample and head",
        lambda net, x, m: net(x, x, x, attn_mask=m.repeat_interleave(2, 0))[0],
        lambda s: (_sequence(s), ~_keep_first(s.mask(s.B, s.T, s.T))),
        _attention(batch_first=True),
    ),
    Case(
        "MultiheadAttention bias_kv, zero_attn",
        lambda net, x: net(x, x, x)[0],
        _sequence,
        _attention(batch_first=True, add_bias_kv=True, add_zero_attn=True),
    ),
    Case(
        "TransformerEncoderLayer",
        lambda net, x, m: net(x, src_key_padding_mask=m),
        _with_padding,
        lambda s: nn.TransformerEncoderLayer(s.D, 2, 8, batch_first=True, dropout=0.1),
    ),
    Case(
        "TransformerDecoderLayer",
        lambda net, x: net(x, x.flip(1), tgt_mask=_causal(x), tgt_is_causal=True),
        _sequence,
        lambda s: nn.TransformerDecoderLayer(s.D, 2, 8, batch_first=True),
    ),
)
def test_attention_module(case: Case) -> None:
    verify(case)


def _words(s: Sizes) -> torch.Tensor:
    return s.y(s.B, s.T)


@table(
    Case("Embedding", lambda net, x: net(x), _words, lambda s: nn.Embedding(s.C, s.D)),
    Case("Embedding of one word", lambda net, x: net(x), lambda s: s.y(s.B), lambda s: nn.Embedding(s.C, s.D)),
    Case("Embedding padding_idx", lambda net, x: net(x), _words, lambda s: nn.Embedding(s.C, s.D, padding_idx=1)),
    Case(
        "Embedding scale_grad_by_freq",
        lambda net, x: net(x),
        _words,
        lambda s: nn.Embedding(s.C, s.D, scale_grad_by_freq=True),
    ),
    Case(
        "Embedding max_norm",
        lambda net, x: net(x),
        _words,
        lambda s: nn.Embedding(s.C, s.D, max_norm=0.9),
        "it writes to its weight",
    ),
    Case(
        "Embedding sparse",
        lambda net, x: net(x),
        _words,
        lambda s: nn.Embedding(s.C, s.D, sparse=True),
    ),
    Case(
        "Embedding and positions",
        lambda net, x: net(x) + net(torch.arange(x.shape[1]) % net.num_embeddings),
        _words,
        lambda s: nn.Embedding(s.C, s.D),
    ),
    Case(
        "Embedding of an input",
        lambda table, x: F.embedding(x, table),
        lambda s: (s.x(s.C, s.D), _words(s)),
        options={"batch": (None, 0)},
    ),
    Case("EmbeddingBag mean", lambda net, x: net(x), _words, lambda s: nn.EmbeddingBag(s.C, s.D)),
    Case("EmbeddingBag sum", lambda net, x: net(x), _words, lambda s: nn.EmbeddingBag(s.C, s.D, mode="sum")),
    Case("EmbeddingBag max", lambda net, x: net(x), _words, lambda s: nn.EmbeddingBag(s.C, s.D, mode="max")),
    Case("EmbeddingBag padding_idx", lambda net, x: net(x), _words, lambda s: nn.EmbeddingBag(s.C, s.D, padding_idx=1)),
    Case(
        "EmbeddingBag weights",
        lambda net, x, w: net(x, per_sample_weights=w),
        lambda s: (_words(s), s.p(s.B, s.T)),
        lambda s: nn.EmbeddingBag(s.C, s.D, mode="sum"),
    ),
    Case(
        "EmbeddingBag offsets",
        lambda net, x, o: net(x.flatten(), o),
        lambda s: (_words(s), torch.arange(s.B) * s.T),
        lambda s: nn.EmbeddingBag(s.C, s.D),
    ),
)
def test_embedding(case: Case) -> None:
    verify(case)
