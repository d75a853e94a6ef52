"""The trie of recorded programs: while a program repeats an earlier one, no inference is needed.

*Takes* the keys of recorded calls one after the other. *Gives* the inference that the same call had after the same
calls before it. Operands are named by their position in the program, so a hit compares no shapes at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from koila import events
from koila.ir.prepass import Inference


class TrieNode:
    """One recorded call, after the calls on the way from the root."""

    __slots__ = ("hits", "inference", "successors")

    def __init__(self, inference: Inference | None) -> None:
        self.inference = inference
        self.successors: OrderedDict[Hashable, TrieNode] = OrderedDict()
        self.hits = 0


class TrieCache:
    """Programs as paths; `max_successors` bounds the fan-out of a node, `max_nodes` the whole trie.

    >>> trie = TrieCache()
    >>> trie.traverse("relu") is None
    True
    >>> _ = trie.insert("relu", Inference("out", ()))
    >>> trie.reset_current()
    >>> trie.traverse("relu").structure
    'out'
    """

    def __init__(self, max_successors: int = 64, max_nodes: int = 200_000) -> None:
        self.max_successors = max_successors
        self.max_nodes = max_nodes
        self.num_nodes = 0
        self.root = TrieNode(None)
        self.current = self.root

    def reset_current(self) -> None:
        """Start again at the root: a new program begins."""
        self.current = self.root

    def traverse(self, key: Hashable) -> Inference | None:
        """Follow the call from the current node; None if no program went this way."""
        successor = self.current.successors.get(key)
        if successor is None:
            events.count("trie::miss::" + ("new program" if self.current.successors else "end of the known path"))
            return None
        successor.hits += 1
        self.current = successor
        events.count("trie::hit")
        return successor.inference

    def insert(self, key: Hashable, inference: Inference) -> TrieNode:
        """Add the call behind the current node and go there."""
        if self.num_nodes >= self.max_nodes:
            self.clear()
        successors = self.current.successors
        if len(successors) >= self.max_successors:
            successors.popitem(last=False)
        node = successors[key] = TrieNode(inference)
        self.num_nodes += 1
        self.current = node
        return node

    def clear(self) -> None:
        """Forget every program."""
        self.root = TrieNode(None)
        self.current = self.root
        self.num_nodes = 0
