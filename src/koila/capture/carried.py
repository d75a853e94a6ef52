"""Values that a loop carries from batch to batch: small ones are run before the next batch is made lazy.

*Takes* what the calling thread has pending. *Gives* real tensors for those values that keep more alive than they are:
in `total += loss` over many batches each pending sum would hold the inputs of every batch before it.

A value is run if the user holds it, if it does not require grad (a loss that is still to be differentiated stays as it
is), and if it is smaller than the tensors that nothing but its pending program keeps alive. An input that the user
still holds is not counted, so that nothing runs between the tensors of one batch.
"""

from __future__ import annotations

from koila import events
from koila.capture.bridge import Bridge
from koila.capture.pending import recorder
from koila.ir.graph import collect
from koila.ir.node import Value
from koila.ir.source import Site

WHY = "carried to the next batch"


def run_carried() -> None:
    """Run small values of earlier batches that keep their inputs alive; counted once per place (Rule 6)."""
    if recorder.is_idle:
        return
    settled = recorder.place.not_carried
    carried = [value for value in recorder.held_without_grad() if value not in settled and _keeps_more_alive(value)]
    if not carried:
        return
    sites: set[Site] = {value.node.site for value in carried if value.node is not None}
    for site in sites:
        events.forced(WHY, site)
    try:
        Bridge.realizer.materialize(carried, WHY)
    except Exception:  # Nobody has asked for these values: whoever does will see the error.
        settled.update(carried)
        for site in sites:
            events.count("carried::left pending", site=site)


def _keeps_more_alive(value: Value) -> bool:
    """Whether a value is smaller than what only its pending program refers to."""
    operands = {operand for node in collect([value], []).nodes for operand in node.values()}
    reals = [operand for operand in operands if operand.real is not None]
    kept = [operand for operand in reals if not operand.is_held]
    if any(operand.real is not None and operand.real.grad_fn is not None for operand in kept):
        return True
    if value.prepass.num_bytes < sum(operand.prepass.num_bytes for operand in kept):
        return True
    if len(kept) == len(reals):  # The user holds none of them any more: the answer stays the same.
        recorder.place.not_carried.add(value)
    return False
