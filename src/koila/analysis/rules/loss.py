"""Rules for losses that are one operator: elementwise, summed, or averaged over samples.

*Takes* calls with a `reduction`. *Gives* the table `ROWS`. A sum over the batch is Merged(Sum); a mean is the sum of
the chunks' means, each weighted by its share of the samples. Most losses are decomposed when a program is traced for
a split; these rules hold for a graph that was not.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.chunk_rule import Call, ChunkRule, Rule
from koila.analysis.rules._rows import either, letters, plain_number, pointwise, weighted

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


def reducing(elements: Rule, summed: Rule) -> Rule:
    """A loss: `elements` rules it without a reduction, `summed` with one."""

    def rule(call: Call) -> ChunkRule | None:
        reduction = call["reduction"]
        if not plain_number(reduction) or reduction not in (_NONE, _MEAN, _SUM):
            return None
        ruling = (elements if reduction == _NONE else summed)(call)
        if ruling is None or reduction != _MEAN:
            return ruling
        return weighted(ruling, call, ruling.result)

    return rule


def _same_shapes(call: Call) -> bool:
    return bool(call["self"].shape == call["target"].shape)


_ELEMENTWISE = reducing(pointwise, letters("self=* target=* weight=* -> +", when=_same_shapes))
_ELEMENTWISE_WITH_LOGITS = reducing(pointwise, letters("self=* target=* weight=* pos_weight=* -> +", when=_same_shapes))
_ELEMENTWISE_PAIR = reducing(pointwise, letters("self=* target=* -> +", when=_same_shapes))
_BACKWARD = reducing(pointwise, pointwise)
_PER_SAMPLE = reducing(letters("self=nC target=n -> n"), letters("self=nC target=n -> +"))
_PER_SAMPLE_BACKWARD = reducing(
    letters("grad_output=n self=nC target=n -> nC"), letters("grad_output=_ self=nC target=n -> nC")
)


def _in_batches(rule: Rule) -> Rule:
    """Without a dimension for samples there is nothing to cut."""
    return either(lambda call: rule(call) if call["self"].ndim == 2 else None)


ROWS: dict[Any, Rule] = {
    aten.mse_loss.default: _ELEMENTWISE_PAIR,
    aten.mse_loss_backward.default: _BACKWARD,
    aten.smooth_l1_loss.default: _ELEMENTWISE_PAIR,
    aten.smooth_l1_loss_backward.default: _BACKWARD,
    aten.huber_loss.default: _ELEMENTWISE_PAIR,
    aten.huber_loss_backward.default: _BACKWARD,
    aten.soft_margin_loss.default: _ELEMENTWISE_PAIR,
    aten.soft_margin_loss_backward.default: _BACKWARD,
    aten.binary_cross_entropy.default: _ELEMENTWISE,
    aten.binary_cross_entropy_backward.default: _BACKWARD,
    aten.binary_cross_entropy_with_logits.default: _ELEMENTWISE_WITH_LOGITS,
    aten.multi_margin_loss.default: _in_batches(_PER_SAMPLE),
    aten.multi_margin_loss_backward.default: _in_batches(_PER_SAMPLE_BACKWARD),
}
