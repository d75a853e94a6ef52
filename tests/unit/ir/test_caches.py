"""The bounded cache and the trie of programs."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

import koila
from koila.capture.pending import recorder
from koila.ir import prepass
from koila.ir.cache import Cache, clear_all
from koila.ir.infer import shape_cache
from koila.ir.prepass import Inference
from koila.ir.trie import FEW_PROGRAMS, TrieCache


@pytest.fixture(autouse=True)
def counted() -> None:
    koila.metrics.reset()


def value(name: str) -> int:
    return koila.metrics.counter_value(name)


def test_a_cache_makes_an_entry_once() -> None:
    cache: Cache[int] = Cache("squares", max_size=2)
    assert cache.get_or_add(3, lambda: 9) == 9
    assert cache.get_or_add(3, lambda: 0) == 9
    assert value("squares::hit") == 1 and value("squares::miss::new") == 1


def test_a_cache_drops_the_least_recently_used() -> None:
    cache: Cache[int] = Cache("squares", max_size=2)
    for number in (1, 2, 1, 3):
        cache.get_or_add(number, lambda number=number: number**2)
    assert len(cache) == 2
    assert cache.get(1) == 1 and cache.get(3) == 9
    assert cache.get(2) is None
    assert value("squares::miss::new or dropped") == 1


def test_a_cleared_cache_is_empty() -> None:
    cache: Cache[int] = Cache("squares", max_size=2)
    cache.add(1, 1)
    cache.clear()
    assert len(cache) == 0 and cache.get(1) is None


def test_a_cache_may_be_bounded_by_what_its_entries_weigh() -> None:
    cache: Cache[str] = Cache("texts", max_size=10, weigh=len)
    for text in ("aaaa", "bbbb", "cccc"):
        cache.add(text[0], text)
    assert cache.get("a") is None and cache.get("b") == "bbbb" and cache.weight == 8
    cache.add("b", "b")
    assert cache.weight == 5, "an entry that replaces another one weighs alone"
    assert cache.add("long", "x" * 11) == "x" * 11
    assert cache.get("long") is None and len(cache) == 0


def test_a_cache_may_hold_its_latest_entries_whatever_they_weigh() -> None:
    cache: Cache[str] = Cache("texts", max_size=10, weigh=len, always=2)
    for name in "abc":
        cache.add(name, name * 11)
    assert cache.get("a") is None and cache.get("b") and cache.get("c")


def test_a_cache_is_safe_under_threads() -> None:
    cache: Cache[int] = Cache("squares", max_size=8)
    wrong: list[int] = []

    def work(start: int) -> None:
        for number in range(2000):
            key = (number * 7 + start) % 32
            if cache.get_or_add(key, lambda key=key: key**2 + 1) != key**2 + 1:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(cache) == cache.weight == 8


def test_one_call_empties_every_cache() -> None:
    cache: Cache[int] = Cache("squares", max_size=2)
    cache.add(1, 1)
    trie = TrieCache()
    walk(trie, "a", "b")
    koila.run(koila.lazy(torch.ones(3)) + 1)
    assert len(shape_cache) > 0
    clear_all()
    assert len(cache) == len(shape_cache) == trie.num_nodes == 0
    assert koila.run(koila.lazy(torch.ones(3)) + 1).tolist() == [2.0] * 3


def test_records_that_nothing_refers_to_are_forgotten() -> None:
    clear_all()
    before = len(prepass._interned)
    for size in range(1, 200):
        koila.run(koila.lazy(torch.ones(size, 7)) + 1)
    clear_all()
    gc.collect()
    assert len(prepass._interned) <= before + 1


def walk(trie: TrieCache, *keys: str) -> list[object]:
    trie.reset_current()
    found = []
    for key in keys:
        inference = trie.traverse(key)
        found.append(None if inference is None else inference.structure)
        if inference is None:
            trie.insert(key, Inference(key, ()))
    return found


def test_a_trie_knows_a_program_that_it_has_seen() -> None:
    trie = TrieCache()
    assert walk(trie, "a", "b", "c") == [None, None, None]
    assert walk(trie, "a", "b", "c") == ["a", "b", "c"]
    assert walk(trie, "a", "c") == ["a", None], "the same call after other calls is another node"
    assert trie.num_nodes == 4
    assert value("trie::hit") == 4


def test_a_trie_says_why_it_missed() -> None:
    trie = TrieCache()
    walk(trie, "a", "b")
    walk(trie, "a", "c")
    assert value("trie::miss::end of the known path") == 2
    assert value("trie::miss::new program") == 1


def test_the_fan_out_of_a_trie_is_bounded() -> None:
    trie = TrieCache(max_successors=2)
    walk(trie, "a", "x", "y")
    walk(trie, "b")
    walk(trie, "a")
    walk(trie, "c")
    assert set(trie.root.successors) == {"a", "c"}, "b was used least recently"
    assert trie.num_nodes == 4
    walk(trie, "d")
    assert set(trie.root.successors) == {"c", "d"} and trie.num_nodes == 2


def test_a_full_trie_forgets_the_program_that_was_used_least_recently() -> None:
    trie = TrieCache(max_nodes=6)
    walk(trie, "a", "b", "c")
    walk(trie, "a", "d")
    walk(trie, "e", "f")
    assert trie.num_nodes == 6
    assert walk(trie, "a", "b", "c") == ["a", "b", "c"]
    assert walk(trie, "g") == [None]
    assert walk(trie, "a", "b", "c") == ["a", "b", "c"]
    assert walk(trie, "e", "f") == ["e", "f"]
    assert walk(trie, "a", "d") == ["a", None], "the calls that it shared with another program are still there"
    assert trie.num_nodes <= 6


def test_a_trie_stays_inside_its_bound_whatever_it_is_told() -> None:
    generator = random.Random(1)
    trie = TrieCache(max_successors=3, max_nodes=20)
    for _ in range(300):
        program = [generator.choice("abcdef") for _ in range(generator.randrange(1, 9))]
        found = walk(trie, *program)
        assert all(known in (None, key) for known, key in zip(found, program, strict=True))
        assert trie.num_nodes == count_nodes(trie) <= 20


def test_many_programs_go_but_the_latest_stay_whatever_their_length() -> None:
    trie = TrieCache()
    programs = [[f"{number}.{call}" for call in range(300)] for number in range(40)]
    for program in programs:
        walk(trie, *program)
    assert trie.num_nodes <= 300 * (FEW_PROGRAMS + 1)
    assert all(walk(trie, *program) == program for program in programs[-FEW_PROGRAMS:])
    assert walk(trie, *programs[0]) == [None] * 300


def count_nodes(trie: TrieCache) -> int:
    found, below = 0, list(trie.root.successors.values())
    while below:
        node = below.pop()
        found += 1
        below += node.successors.values()
    return found


def test_a_program_that_is_longer_than_the_trie_leaves_it() -> None:
    trie = TrieCache(max_nodes=2)
    assert walk(trie, "a", "b", "c", "d") == [None] * 4
    assert trie.num_nodes == 2 and trie.current is None
    assert walk(trie, "a", "b", "c") == ["a", "b", None]
    assert value("trie::miss::forgotten") > 0


def test_a_program_whose_beginning_was_forgotten_is_not_continued_at_the_root() -> None:
    trie = recorder.log.trie
    recorder.new_epoch()
    long, short = torch.randn(3, 5), torch.randn(7, 2)
    first = torch.relu(koila.lazy(long))
    trie.clear()
    second = torch.relu(koila.lazy(short))
    third = torch.abs(first)
    assert third.shape == (3, 5)
    koila.run([second, third])
    again = torch.abs(torch.relu(koila.lazy(short)))
    assert again.shape == again.run().shape == (7, 2)


def test_a_loop_through_more_entries_than_are_held_gets_room_for_them() -> None:
    """The least recently used entry is always the one that such a loop needs next."""
    cache = Cache[int]("loop", max_size=5, weigh=lambda size: size, always=4)
    made = list[int]()

    def through(keys: range) -> int:
        made.clear()
        for key in keys:
            cache.get_or_add(key, lambda: made.append(1) or 3)  # type: ignore[func-returns-value]
        return len(made)

    assert through(range(7)) == 7
    assert through(range(7)) > 0
    assert through(range(7)) == 0
    assert len(cache) == 7
    cache.clear()
    assert through(range(100)) == 100 and len(cache) == 4  # What comes once needs no room.


def test_a_cache_that_grows_with_its_loop_is_bounded_by_weight() -> None:
    cache = Cache[int]("loop", max_size=5, weigh=lambda size: size, always=4)
    for _ in range(20):
        for key in range(100):
            cache.get_or_add(key, lambda: 3)
    assert cache.weight <= 50 + 3
