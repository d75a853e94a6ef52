"""The bounded cache and the trie of programs."""

from __future__ import annotations

import pytest

import koila
from koila.ir.cache import Cache
from koila.ir.prepass import Inference
from koila.ir.trie import TrieCache


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


def test_a_trie_is_bounded() -> None:
    trie = TrieCache(max_successors=2, max_nodes=5)
    for key in "abc":
        walk(trie, key)
    assert len(trie.root.successors) == 2 and "a" not in trie.root.successors
    for key in "defgh":
        walk(trie, key)
    assert trie.num_nodes <= 5
