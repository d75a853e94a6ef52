"""The conformance runner: torch's own databases and real architectures, through koila.

    python -m tests.conformance.run ops|modules|models [--chunk 1,2,uneven] [--full] [--only NAME] [--limit-seconds N]

Prints one line per suite and its lists; with `--full` also writes them to tests/results.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.conformance.report import Suite
from tests.conformance.trial import Trial, Verdict, check_split, check_whole, chunk_sizes, reference_of

RESULTS = Path(__file__).parent.parent / "results"
TRIAL_SECONDS = {"ops": 30.0, "modules": 30.0, "models": 120.0}
"""How long one run of one trial may take."""


def split_verdicts(trial: Trial, cuts: Iterable[tuple[int, tuple[int | None, ...]]], chunks: Sequence[str],
                   seconds: float) -> list[Verdict]:  # fmt: skip
    """Every cut of a trial at every chunk size."""
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
            found.append(check_split(trial, batches, chunk, seconds, reference, prove=number == 0))
    return found


class Runner:
    """Goes through the entries of one suite."""

    def __init__(
        self, suite: Suite, chunks: Sequence[str], limit_seconds: float, trial_seconds: float, verbose: bool = True
    ) -> None:
        self.suite, self.chunks, self.verbose = suite, chunks, verbose
        self.limit_seconds, self.trial_seconds = limit_seconds, trial_seconds

    def entry(self, name: str, trials: Iterable[Trial], cuts: object) -> None:
        """All trials of an entry, within its time."""
        started, verdicts = time.perf_counter(), self.suite.verdicts[name]
        number = 0
        try:
            for number, trial in enumerate(trials):
                if time.perf_counter() - started > self.limit_seconds:
                    self.suite.cut_short[name] = f"{number} trials in {self.limit_seconds:.0f} s"
                    break
                if self.chunks:
                    verdicts += split_verdicts(trial, cuts(trial), self.chunks, self.trial_seconds)  # type: ignore[operator]
                else:
                    verdicts.append(check_whole(trial, self.trial_seconds))
        except Exception as error:
            self.suite.apart[name] = f"the database raises {type(error).__name__}: {str(error)[:100]}"
        if not verdicts:
            self.suite.apart.setdefault(name, "no samples" if number == 0 else "no dimension to cut")
        if self.verbose:
            self._progress(name, verdicts, time.perf_counter() - started)

    def _progress(self, name: str, verdicts: list[Verdict], seconds: float) -> None:
        wrong = next((verdict for verdict in verdicts if verdict.wrong), None)
        if wrong is not None or seconds > 60:
            text = f"{wrong.label}: {wrong.wrong}" if wrong is not None else "slow"
            print(f"  {name} ({seconds:.0f} s): {text}", file=sys.stderr, flush=True)


def run_suite(name: str, chunks: Sequence[str] = (), full: bool = False, only: str | None = None,
              limit_seconds: float = 600.0, keep: object = None, verbose: bool = True) -> Suite:  # fmt: skip
    """Run a suite; `keep` chooses entries by name."""
    source = importlib.import_module(f"tests.conformance.{name}")
    found = source.entries()
    suite = Suite(name + (" " + ",".join(chunks) if chunks else ""), len(found), splits=bool(chunks))
    runner = Runner(suite, chunks, limit_seconds, TRIAL_SECONDS[name], verbose)
    for entry_name, entry in found.items():
        if only is not None and not fnmatch.fnmatchcase(entry_name, only):
            continue
        if keep is not None and not keep(entry_name):  # type: ignore[operator]
            continue
        if not source.has_cpu_dtype(entry):
            suite.apart[entry_name] = "no dtype of the CPU"
            continue
        choose = source.all_trials if full else source.chosen_trials
        trials = choose(entry, source.SPLIT_DTYPES, True) if chunks else choose(entry)
        runner.entry(entry_name, trials, source.cuts)
    return suite


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", choices=("ops", "modules", "models"))
    parser.add_argument("--chunk", default="", help="chunk sizes, such as 1,2,uneven; without it programs run whole")
    parser.add_argument("--full", action="store_true", help="all samples, and write the lists to tests/results")
    parser.add_argument("--only", help="an entry's name, or a pattern such as 'nn.functional.*'")
    parser.add_argument("--limit-seconds", type=float, default=600.0, help="how long one entry may take")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chunks = tuple(part for part in options.chunk.split(",") if part)
    started = time.perf_counter()
    suite = run_suite(options.suite, chunks, options.full, options.only, options.limit_seconds)
    text = "\n".join(suite.lines())
    print(text)
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
    if options.full and options.only is None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.suite}{'-chunk' if chunks else ''}.txt").write_text(text + "\n")
    return 1 if suite.wrong() else 0


if __name__ == "__main__":
    sys.exit(main())
