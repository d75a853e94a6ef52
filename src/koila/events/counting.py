"""Counters, and the places in the user's program at which they were raised.

*Takes* names with amounts and sites. *Gives* what was counted, and where.

Counters take no lock, because `count` is called for every recorded function: two threads that count the same name at
the same instant may lose one of the two.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

MAX_SITES = 256
"""How many distinct sites a counter keeps; what comes after them is counted under `OTHER_SITES`."""
OTHER_SITES = "(other sites)"

Site: TypeAlias = str | Callable[[], str]


class _Sites:
    """The places at which one counter was raised: at most `MAX_SITES` of them, as text or as what makes the text."""

    __slots__ = ("amounts", "num_callables", "num_other")

    def __init__(self) -> None:
        self.amounts: dict[Site, list[int]] = {}
        """Each amount is in a list of one: the hash of a site takes longer than anything else here."""
        self.num_callables = 0
        self.num_other = 0

    def add(self, site: Site, amount: int) -> None:
        amounts = self.amounts
        known = amounts.get(site)
        if known is not None:
            known[0] += amount
        elif len(amounts) < MAX_SITES:
            amounts[site] = [amount]
            self.num_callables += not isinstance(site, str)
        else:
            self._add_when_full(site, amount)

    def _add_when_full(self, site: Site, amount: int) -> None:
        # Different callables may stand for one place: as text they share an entry and make room.
        if self.num_callables:
            self.amounts = {text: [before] for text, before in self._by_text().items()}
            self.num_callables = 0
        text = site_text(site)
        if text in self.amounts or len(self.amounts) < MAX_SITES:
            self.amounts.setdefault(text, [0])[0] += amount
        else:
            self.num_other += amount

    def _by_text(self) -> Counter[str]:
        texts: Counter[str] = Counter()
        for site, (amount,) in list(self.amounts.items()):
            texts[site_text(site)] += amount
        return texts

    def resolve(self) -> Counter[str]:
        texts = self._by_text()
        if self.num_other:
            texts[OTHER_SITES] += self.num_other
        return texts


def site_text(site: Site) -> str:
    """The text of a site; one that is not text is asked for it."""
    return site if isinstance(site, str) else site()


_counts: defaultdict[str, int] = defaultdict(int)
_sites: dict[str, _Sites] = {}


def count(name: str, amount: int = 1, site: Site | None = None) -> None:
    """Raise a counter.

    Args:
        name: the counter, as `prefix::what`.
        amount: by how much.
        site: the place in the user's program, as text, or as a hashable callable that is asked for the text only when
            sites are read (or when a counter has `MAX_SITES` of them). Callables that compare equal for the same place
            share one entry.

    >>> forget_counters()
    >>> count("forced::item", site="train.py:41")
    >>> count("forced::item", site=lambda: "train.py:41")
    >>> counters()["forced::item"], sites("forced::item")
    (2, Counter({'train.py:41': 2}))
    """
    _counts[name] += amount
    if site is not None:
        _add_site(name, site, amount)


class Tally:
    """Counters that are raised together, again and again: by what a known program counts when it runs.

    Args:
        amounts: counter → by how much it is raised.

    >>> forget_counters()
    >>> tally = Tally({"runs": 1, "executed::relu": 2})
    >>> count_all(tally)
    >>> count_all(tally)
    >>> counters()
    {'runs': 2, 'executed::relu': 4}
    """

    __slots__ = ("amounts",)

    def __init__(self, amounts: Mapping[str, int]) -> None:
        self.amounts = amounts


MAX_TALLIES = 64
"""So many tallies wait to be added to the counters."""
_tallies: dict[Tally, int] = {}
"""How often each was counted since it was last added to the counters."""


def count_all(tally: Tally) -> None:
    """Raise the counters of a tally, without sites; they are added up when somebody reads counters."""
    times = _tallies.get(tally, 0)
    if not times and len(_tallies) >= MAX_TALLIES:
        _add_tallies()
    _tallies[tally] = times + 1


def _add_tallies() -> None:
    while _tallies:
        tally, times = _tallies.popitem()
        for name, amount in tally.amounts.items():
            _counts[name] += times * amount


def _add_site(name: str, site: Site, amount: int) -> None:
    known = _sites.get(name)
    if known is None:
        known = _sites.setdefault(name, _Sites())
    known.add(site, amount)


def counters() -> dict[str, int]:
    """Give a copy of all counters: name → value."""
    _add_tallies()
    return dict(_counts)


def sites(name: str) -> Counter[str]:
    """Give the places at which a counter was raised: text → amount; empty when none were given."""
    known = _sites.get(name)
    return known.resolve() if known is not None else Counter()


def forget_counters() -> None:
    """Forget all counters and their sites."""
    _tallies.clear()
    _counts.clear()
    _sites.clear()
