"""Values that a loop carries from batch to batch: small ones are run before the next batch is made lazy.

*Takes* what the calling thread has pending. *Gives* real tensors for those values that keep more alive than they are:
in `total += loss` over many batches each pending sum would hold the inputs of every batch before it.

A value is run if the user holds it, if it does not require grad (a loss that is still to be differentiated stays as it
is), and if it is smaller than the tensors that nothing but its pending program keeps alive. An input that the user
still holds is not counted, so that nothing runs between the tensors of one batch.
"""

from __future__ import annotations

from math import inf

from koila import events
from koila.capture.bridge import Bridge
from koila.capture.pending import recorder
from koila.errors import KoilaError
from koila.ir.graph import collect
from koila.ir.node import Value
from koila.ir.source import Site

WHY = "carried to the next batch"


def run_carried() -> None:
    """Run small values of earlier batches that keep their inputs alive; counted once per place (Rule 6)."""
    given_up = recorder.place.given_up
    carried = [value for value in recorder.held() if value not in given_up and _keeps_more_alive(value)]
    if not carried:
        return
    sites: set[Site] = {value.node.site for value in carried if value.node is not None}
    for site in sites:
        events.forced(WHY, site)
    try:
        Bridge.realizer.materialize(carried, WHY)
    except KoilaError:  # Nobody has asked for these values: whoever does will see the error.
        given_up.update(carried)
        for site in sites:
            events.count("carried::left pending", site=site)


def _keeps_more_alive(value: Value) -> bool:
    return not value.requires_grad and value.prepass.num_bytes < _kept_bytes(value)


def _kept_bytes(value: Value) -> float:
    """Bytes of real tensors that only the pending program of a value refers to; without end if one has a history."""
    operands = {operand for node in collect([value], []).nodes for operand in node.values()}
    kept = [operand for operand in operands if operand.real is not None and not operand.is_held]
    if any(operand.real is not None and operand.real.grad_fn is not None for operand in kept):
        return inf
    return sum(operand.prepass.num_bytes for operand in kept)
