"""The verdicts of a suite, counted and written.

*Takes* verdicts by entry. *Gives* the line of the suite and its lists.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.conformance.record import Outcome
from tests.conformance.table import Row, lines
from tests.conformance.trial import Verdict


@dataclass
class Suite:
    """All verdicts of one suite."""

    name: str
    num_entries: int
    verdicts: defaultdict[str, list[Verdict]] = field(default_factory=lambda: defaultdict(list))
    apart: dict[str, str] = field(default_factory=dict)
    """Entries that cannot be compared, with the reason."""
    cut_short: dict[str, str] = field(default_factory=dict)
    """Entries whose time was over before all samples were tried."""
    splits: bool = False
    """Whether the suite cut its programs."""
    rows: dict[str, Row] = field(default_factory=dict)
    """What the cut of each entry buys, where that was measured."""
    unmeasured: dict[str, str] = field(default_factory=dict)
    """Entries of which that could not be measured, with the reason."""
    not_run: list[str] = field(default_factory=list)
    """Entries of which nothing is known yet."""
    commits: Counter[str] = field(default_factory=Counter)
    """How many entries ran on each commit."""

    def add(self, name: str, outcome: Outcome) -> None:
        """Take in what was found out about an entry."""
        if outcome.verdicts:
            self.verdicts[name] = outcome.verdicts
        if outcome.apart is not None:
            self.apart[name] = outcome.apart
        if outcome.cut_short is not None:
            self.cut_short[name] = outcome.cut_short
        if outcome.row is not None:
            self.rows[name] = outcome.row
        if outcome.unmeasured is not None:
            self.unmeasured[name] = outcome.unmeasured
        if outcome.commit:
            self.commits[outcome.commit] += 1

    def wrong(self) -> dict[str, str]:
        return self._first(lambda verdict: verdict.wrong)

    def fell_back(self) -> dict[str, str]:
        """Entries in which something ran eagerly although no shape depends on data."""
        return self._first(lambda v: None if v.data_dependent else v.fell_back)

    def wrote_input(self) -> dict[str, str]:
        """Entries whose in-place variant was also called on a real input, and ran at once."""
        return self._first(lambda verdict: verdict.wrote_input)

    def data_dependent(self) -> dict[str, str]:
        return self._first(lambda v: v.fell_back if v.data_dependent else None)

    def strides(self) -> dict[str, str]:
        return self._first(lambda verdict: verdict.strides)

    def split(self) -> list[str]:
        """Entries with a result that is proved Sliced, Merged or Uniform."""
        return [name for name, found in self.verdicts.items() if any(verdict.proved for verdict in found)]

    def ran_whole(self) -> dict[str, str]:
        """Entries of which nothing is proved, with the reasons."""
        proved = set(self.split())
        found = {}
        for name, verdicts in self.verdicts.items():
            reasons = Counter(reason for verdict in verdicts for reason in verdict.whole)
            if name not in proved and any(verdict.skipped is None for verdict in verdicts):
                cut = " (parts of it were cut)" if any(verdict.num_split for verdict in verdicts) else ""
                found[name] = (reasons.most_common(1)[0][0] if reasons else "a result is whole") + cut
        return found

    def equal(self) -> list[str]:
        wrong = self.wrong()
        compared = {name for name, found in self.verdicts.items() if any(verdict.skipped is None for verdict in found)}
        return [name for name in self.verdicts if name in compared and name not in wrong]

    def not_compared(self) -> dict[str, str]:
        """Entries of which no sample could be compared."""
        found = dict(self.apart)
        for name, verdicts in self.verdicts.items():
            if verdicts and all(verdict.skipped is not None for verdict in verdicts):
                found[name] = str(verdicts[0].skipped)
        return found

    def _first(self, pick: object) -> dict[str, str]:
        found = {}
        for name, verdicts in self.verdicts.items():
            picked = [(verdict.label, text) for verdict in verdicts if (text := pick(verdict)) is not None]  # type: ignore[operator]
            if picked:
                found[name] = f"{len(picked)} of {len(verdicts)}: {picked[0][0]}: {picked[0][1]}"
        return found

    @property
    def num_samples(self) -> int:
        return sum(len(found) for found in self.verdicts.values())

    def line(self) -> str:
        split = f"{len(self.split())} split" if self.splits else "0 split"
        return (
            f"{self.name}: {self.num_entries} entries, {self.num_samples} samples, {len(self.equal())} equal, "
            f"{len(self.fell_back())} fell back, {len(self.wrong())} wrong, {split}"
        )

    def lines(self) -> Iterator[str]:
        """The line of the suite, then its lists."""
        yield self.line()
        if self.commits:
            ran = ", ".join(f"{commit} ({number} entries)" for commit, number in self.commits.most_common())
            yield f"run on commit {ran}"
        lists = [
            ("wrong", self.wrong()),
            ("fell back", self.fell_back()),
            ("shape depends on data", self.data_dependent()),
            (
                "in-place on a real input runs at once, because eager code sees it; not among the fallen",
                self.wrote_input(),
            ),
            ("not compared", self.not_compared()),
            ("not run", dict.fromkeys(self.not_run, "")),
            ("out of time", self.cut_short),
            ("not measured", self.unmeasured),
            ("strides differ", self.strides()),
        ]
        if self.splits:
            lists.append(("ran whole", self.ran_whole()))
            lists.append(("split", dict.fromkeys(self.split(), "")))
        for title, found in lists:
            yield f"\n{title}: {len(found)}"
            yield from (f"  {name}" + (f": {text}" if text else "") for name, text in sorted(found.items()))
        yield from self._breaks()
        if self.rows:
            yield from lines(self.rows)

    def _breaks(self) -> Iterator[str]:
        if self.name.startswith("models"):
            yield "\ngraph breaks"
            for name, verdicts in self.verdicts.items():
                found = Counter(text for verdict in verdicts for text in verdict.breaks)
                split = ""
                if self.splits:
                    cut = [verdict for verdict in verdicts if verdict.num_split]
                    whole = sorted({reason for verdict in verdicts for reason in verdict.whole})
                    split = f"; {len(cut)} of {len(verdicts)} split" + (f" ({'; '.join(whole)})" if whole else "")
                yield f"  {name}: {', '.join(sorted(found)) or 'none'}{split}"
