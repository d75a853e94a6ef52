"""One script in a process of its own: `python -m benchmarks.process.child gpt --lazy --room 314572800`.

*Takes* the script, whether its batches are lazy, the room that the process gets (RLIMIT_DATA above what it holds before
the first step), the budget of the process. *Gives* a line of JSON on stdout when it starts and after each step.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from contextlib import nullcontext

import torch

import koila
from benchmarks.process.memory import memory_of
from benchmarks.process.scripts import SCRIPTS, Script
from benchmarks.programs import Batch


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _lazy(batch: Batch) -> Batch:
    made = koila.lazy(*batch)
    return made if isinstance(made, tuple) else (made,)


def train(script: Script, lazy: bool, num_steps: int) -> None:
    """Run the steps as a user's loop would."""
    optimizer = None if script.optimizer is None else script.optimizer()
    for step in range(num_steps):
        started = time.process_time()
        batch = _lazy(script.batch(step)) if lazy else script.batch(step)
        loss = script.loss(batch)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _say(loss=loss.item(), seconds=time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", choices=list(SCRIPTS))
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--room", type=int, default=0, help="bytes; 0 is no limit")
    parser.add_argument("--budget", type=int, default=0, help="bytes; 0 is none")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    script = SCRIPTS[given.script]()
    data, resident = memory_of("self")
    _say(data=data, resident=resident)
    if given.room:
        resource.setrlimit(resource.RLIMIT_DATA, (data + given.room, data + given.room))
    with koila.budget(given.budget, process=True) if given.budget else nullcontext():
        train(script, given.lazy, given.steps)


if __name__ == "__main__":
    main()
