"""Learned demand: what became of the gradients of a program the last time it ran.

*Takes* jobs and the backward passes that followed them. *Gives* whether one run should serve both.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from koila import events
from koila.ir.cache import Cache
from koila.ir.job import Job


class BackwardHistory:
    """Whether a backward pass follows when a program's value is read; holds no tensors of the program."""

    __slots__ = ("asked", "backs_off", "guessed", "num_calls", "seed")

    def __init__(self, num_calls: int = 0) -> None:
        self.num_calls = num_calls
        """How many calls the program has, by which it is known."""
        self.asked = False
        """Whether one followed the last time."""
        self.guessed = False
        """Whether the last run computed gradients before anybody asked."""
        self.backs_off = False
        """Whether a guess was wrong: then none is made any more."""
        self.seed: float | torch.Tensor = 1.0
        """The seed with which it came: one, or the scale of a loss."""

    def ran(self, guessed: bool) -> None:
        """The program has run again."""
        if self.guessed and not self.asked:
            self.backs_off = True
            events.count("learned_demand::wrong")
        self.guessed, self.asked = guessed, False

    def followed(self, seed: torch.Tensor | None) -> None:
        """A backward pass came."""
        self.asked = True
        if seed is not None and seed.numel() == 1:
            # Reading it would make the host wait for an accelerator.
            self.seed = float(seed.detach()) if seed.device.type == "cpu" else seed.detach().reshape(()).clone()


MAX_CALLS = 4_096
"""Histories are kept as long as their programs have fewer calls in all; each takes about 1.2 KiB."""
ALWAYS = 16
"""So many are kept in any case."""
_histories: Cache[BackwardHistory] = Cache("demand_cache", MAX_CALLS, lambda history: 1 + history.num_calls, ALWAYS)


def _key(job: Job) -> Hashable:
    return job.graph.key, job.demand


def history_of(job: Job) -> BackwardHistory:
    """The history of a job's program."""
    return _histories.get_or_add(_key(job), lambda: BackwardHistory(len(job.graph.nodes)))


def expects_backward(job: Job) -> bool:
    """Whether a backward pass followed the last time, and no guess was wrong."""
    found = _histories.get(_key(job))
    return found is not None and found.asked and not found.backs_off


def forget_histories() -> None:
    """Learn anew."""
    _histories.clear()
