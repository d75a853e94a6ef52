"""The conformance runner: torch's own databases and real architectures, through koila.

    python -m tests.conformance.run ops|modules|models [--chunk 1,2,uneven] [--full] [--only NAME] [--limit-seconds N]
                                                       [--record FOLDER [--report]]

Prints one line per suite and its lists; with `--full` also writes them to tests/results. With `--record` each entry is
written to a folder as soon as it is done: the same command, started several times, shares the work, and a run that was
stopped goes on from there; `--report` prints what there is so far.

What *fell back* means: in some trial of the entry something was materialised, or run eagerly in the middle, without
the program asking for it. Two lists stand apart from it. A call whose result has a shape that depends on data can only
run (fake tensors refuse it for that reason, which is checked), and so can one that gives a Python value (`equal`). An
in-place call on a real input must run at once: the user's own tensor changes, and eager code sees it from the next line
on (Rule 5); a pending write would be missed by numpy, by a view or by a second reference. So every in-place variant is
tried twice: on a lazy value (a copy of the input, as inside a program), which counts like everything else, and, where
eager allows it, on the input itself.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.witness import HANG_SECONDS
from tests.conformance import families
from tests.conformance.record import Outcome, Record, commit
from tests.conformance.report import Suite
from tests.conformance.sharing import forget, share
from tests.conformance.trial import Trial, Verdict, check_split, check_whole, chunk_sizes, last_line, reference_of
from tests.seeding import seed_present_devices_only

RESULTS = Path(__file__).parent.parent / "results"


def split_verdicts(trial: Trial, cuts: Iterable[tuple[int, tuple[int | None, ...]]], chunks: Sequence[str],
                   seconds: float, prove: bool = True) -> list[Verdict]:  # fmt: skip
    """Every cut of a trial at every chunk size; an entry is proved once."""
    failed = Verdict(trial.label)
    places = [(size, batches) for size, batches in cuts if size >= 2]
    if not places:
        return []
    reference = reference_of(trial, failed)
    if reference is None:
        return [failed]
    found: list[Verdict] = []
    for size, batches in places:
        for number, chunk in enumerate(chunk_sizes(chunks, size)):
            found.append(check_split(trial, batches, chunk, seconds, reference, prove=prove and number == 0))
    return found


class Runner:
    """Goes through the entries of one suite."""

    def __init__(self, chunks: Sequence[str], limit_seconds: float, trial_seconds: float, verbose: bool = True) -> None:
        self.chunks, self.verbose = chunks, verbose
        self.limit_seconds, self.trial_seconds = limit_seconds, trial_seconds
        self.commit = commit()

    def entry(self, name: str, trials: Iterable[Trial], cuts: object) -> Outcome:
        """All trials of an entry, within its time."""
        forget()
        started, outcome = time.process_time(), Outcome(commit=self.commit)
        verdicts = outcome.verdicts
        number = 0
        try:
            for number, trial in enumerate(trials):
                if time.process_time() - started > self.limit_seconds:
                    outcome.cut_short = f"{number} trials in {self.limit_seconds:.0f} s"
                    break
                if self.chunks:
                    prove = not any(verdict.proved for verdict in verdicts)
                    verdicts += split_verdicts(trial, cuts(trial), self.chunks, self.trial_seconds, prove)  # type: ignore[operator]
                else:
                    verdicts.append(check_whole(trial, self.trial_seconds))
        except Exception as error:
            outcome.apart = f"the database raises {type(error).__name__}: {str(error)[:100]}"
        if not verdicts and outcome.apart is None:
            outcome.apart = "no samples" if number == 0 else "no dimension to cut"
        outcome.seconds = time.process_time() - started
        if self.verbose:
            self._progress(name, verdicts, outcome.seconds)
        return outcome

    def _progress(self, name: str, verdicts: list[Verdict], seconds: float) -> None:
        wrong = next((verdict for verdict in verdicts if verdict.wrong), None)
        if wrong is not None or seconds > 60:
            text = f"{wrong.label}: {wrong.wrong}" if wrong is not None else "slow"
            print(f"  {name} ({seconds:.0f} s): {text}", file=sys.stderr, flush=True)


def _outcome(runner: Runner, source: Any, name: str, entry: Any, full: bool) -> Outcome:
    choose = source.all_trials if full else source.chosen_trials
    trials = choose(entry, source.SPLIT_DTYPES, True) if runner.chunks else choose(entry)
    outcome = runner.entry(name, trials, source.cuts)
    if runner.chunks and full and hasattr(source, "measured"):
        try:
            outcome.row = source.measured(entry)
        except Exception as error:
            outcome.unmeasured = last_line(error)
    return outcome


def run_suite(name: str, chunks: Sequence[str] = (), full: bool = False, only: str | None = None,
              limit_seconds: float = 600.0, keep: Callable[[str], bool] | None = None, verbose: bool = True,
              folder: Path | None = None, run: bool = True) -> Suite:  # fmt: skip
    """Run a suite; `keep` chooses entries by name. Without `run`, only what is recorded already."""
    with share():
        return _run_suite(name, chunks, full, only, limit_seconds, keep, verbose, folder, run)


def _run_suite(name: str, chunks: Sequence[str], full: bool, only: str | None, limit_seconds: float,
               keep: Callable[[str], bool] | None, verbose: bool, folder: Path | None, run: bool) -> Suite:  # fmt: skip
    source = importlib.import_module(f"tests.conformance.{name}")
    found = source.entries()
    suite = Suite(name + (" " + ",".join(chunks) if chunks else ""), len(found), splits=bool(chunks))
    runner, record = Runner(chunks, limit_seconds, HANG_SECONDS, verbose), Record(folder)
    chosen = [n for n in found if (only is None or fnmatch.fnmatchcase(n, only)) and (keep is None or keep(n))]
    suite.apart = {n: "no dtype of the CPU" for n in chosen if not source.has_cpu_dtype(found[n])}
    outcomes: dict[str, Outcome] = {}
    gc.freeze()  # The database stays: no collection needs to look at it again.
    for entry_name in chosen:
        if run and entry_name not in suite.apart and record.claim(entry_name):
            outcomes[entry_name] = _outcome(runner, source, entry_name, found[entry_name], full)
            record.write(entry_name, outcomes[entry_name])
    for entry_name in chosen:
        outcome = outcomes.get(entry_name) or record.read(entry_name)
        if outcome is not None:
            suite.add(entry_name, outcome)
        elif entry_name not in suite.apart:
            suite.not_run.append(entry_name)
    return suite


def _families(suite: Suite) -> Iterable[str]:
    apart = {**suite.not_compared(), **suite.data_dependent()}
    return families.lines(importlib.import_module("tests.conformance.ops").entries(), set(suite.split()), apart)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", choices=("ops", "modules", "models"))
    parser.add_argument("--chunk", default="", help="chunk sizes, such as 1,2,uneven; without it programs run whole")
    parser.add_argument("--full", action="store_true", help="all samples, and write the lists to tests/results")
    parser.add_argument("--only", help="an entry's name, or a pattern such as 'nn.functional.*'")
    parser.add_argument("--limit-seconds", type=float, default=600.0, help="how long one entry may take")
    parser.add_argument("--record", type=Path, help="a folder for finished entries, shared by all processes of a run")
    parser.add_argument("--report", action="store_true", help="run nothing: only what is recorded so far")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_present_devices_only()
    chunks = tuple(part for part in options.chunk.split(",") if part)
    started = time.process_time()
    suite = run_suite(
        options.suite, chunks, options.full, options.only, options.limit_seconds, folder=options.record,
        run=not options.report,
    )  # fmt: skip
    print(f"{time.process_time() - started:.0f} s", file=sys.stderr)
    if suite.not_run and not options.report:
        print("the rest is still being done by another process", file=sys.stderr)
        return 0
    everything = options.full and options.only is None
    named = _families(suite) if everything and chunks and options.suite == "ops" else ()
    text = "\n".join([*suite.lines(), *named])
    print(text)
    if everything:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.suite}{'-chunk' if chunks else ''}.txt").write_text(text + "\n")
    return 1 if suite.wrong() else 0


if __name__ == "__main__":
    sys.exit(main())
