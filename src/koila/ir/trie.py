"""The trie of recorded programs: while a program repeats an earlier one, no inference is needed.

*Takes* the keys of recorded calls one after the other. *Gives* the inference that the same call had after the same
calls before it. Operands are named by their position in the program, so a hit compares no shapes at all.

The trie is bounded by its nodes; a few programs stay whatever their length. When it is full, the program that was used
least recently goes: its last call, and the calls before it that no other program shares. What is forgotten in the
middle of a program would leave the rest of it at a wrong place, so such a program leaves the trie until the next one
begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, cast

from koila import events
from koila.ir.cache import register
from koila.ir.prepass import Inference


class TrieNode:
    """One recorded call, after the calls on the way from the root."""

    __slots__ = (
        "depth",
        "followers",
        "histories",
        "inference",
        "is_learned",
        "key",
        "numbers",
        "parent",
        "runs",
        "successors",
        "template",
        "used",
        "uses",
    )

    def __init__(self, inference: Inference | None, parent: TrieNode | None = None, key: Hashable = None) -> None:
        self.inference = inference
        self.parent = parent
        """The call before it; None for the root, and for a node that was forgotten."""
        self.key = key
        """Its name among the successors of `parent`."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """How many calls a program has made when it is here."""
        self.numbers: tuple[float, ...] = ()
        """The numbers among its arguments for which the inference holds: they may vary, and the program goes on."""
        self.successors: dict[Hashable, TrieNode] = {}
        self.used = 0
        """The program (by number) that went through it last."""
        self.template: Any = None
        """How the call is recognised when it comes again; see `koila.capture.template`."""
        self.is_learned = False
        """Whether a template was looked for; a call may have none."""
        self.followers: dict[Any, tuple[TrieNode, ...]] = {}
        """Successors that have a template, by their function."""
        self.uses: tuple[int, ...] | None = None
        """How often each value of a program that ends here is an operand of it; None if nobody has asked."""
        self.histories: dict[Hashable, bool] = {}
        """Whether a program that ends here is a history of gradients, by what the user holds; see `Log.is_history`."""
        self.runs: dict[Hashable, Any] = {}
        """How programs that end here run, by what is asked of them; see `koila.execution.prepared`."""


MANY_NODES = 1_024
"""Beyond so many nodes, of about one KiB each, only the latest programs stay."""
FEW_PROGRAMS = 16
"""So many programs stay as long as the trie is not full: those of a loop, and those that end in the middle of one."""


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
        self.current: TrieNode | None = self.root
        """Where the program stands; None after it left the trie."""
        self._ends: OrderedDict[TrieNode, None] = OrderedDict()
        """The last calls of whole programs, the least recently used first."""
        self.program = 0
        """The number of the program that is recorded now."""
        register(self)

    def reset_current(self) -> None:
        """Start again at the root: a new program begins."""
        current, root = self.current, self.root
        if current is not root:
            self._note_end()
            self.current = root
        self.program += 1

    def traverse(self, key: Hashable, numbers: tuple[float, ...] = ()) -> Inference | None:
        """Follow the call from the current node; None if no program went this way, or not with these numbers."""
        current = self.current
        if current is None:
            events.count("trie::miss::forgotten")
            return None
        successor = current.successors.get(key)
        if successor is None:
            events.count("trie::miss::" + ("new program" if current.successors else "end of the known path"))
            return None
        if successor.numbers != numbers:
            events.count("trie::miss::another number")
            return None
        successor.used = self.program
        self.current = successor
        events.count("trie::hit")
        return successor.inference

    def learn(self, node: TrieNode, func: Any, template: Any) -> None:
        """The call of a node is recognised by this template from now on; by none if it is None."""
        node.is_learned = True
        if template is not None and node.parent is not None:
            node.template = template
            node.parent.followers[func] = (*node.parent.followers.get(func, ()), node)

    def _unlearn(self, node: TrieNode) -> None:
        node.is_learned = False
        if node.template is not None and node.parent is not None:
            func = node.template.func
            node.template = None
            node.parent.followers[func] = tuple(each for each in node.parent.followers[func] if each is not node)

    def leave(self) -> None:
        """Something was recorded that has no place here: until the next program, nothing is known."""
        self._note_end()
        self.current = None

    def insert(self, key: Hashable, inference: Inference, numbers: tuple[float, ...] = ()) -> TrieNode | None:
        """Add the call behind the current node and go there; None if the program is not in the trie."""
        while self.current is not None and self._is_full():
            self._forget_program()
        current = self.current
        if current is None:
            return None
        node = current.successors.get(key)
        if node is None:
            if len(current.successors) >= self.max_successors:
                self._forget_below(min(current.successors.values(), key=lambda node: node.used))
            node = current.successors[key] = TrieNode(inference, current, key)
            self.num_nodes += 1
        self._unlearn(node)
        node.inference, node.numbers, node.used = inference, numbers, self.program
        self.current = node
        return node

    def _is_full(self) -> bool:
        many = self.num_nodes >= MANY_NODES and len(self._ends) > FEW_PROGRAMS
        return many or self.num_nodes >= self.max_nodes

    def clear(self) -> None:
        """Forget every program; one that is being recorded leaves the trie."""
        self.current = self.root if self.current is self.root else None
        self.root.successors = {}
        self.root.followers = {}
        self._ends.clear()
        self.num_nodes = 0

    def _note_end(self) -> None:
        current, ends = self.current, self._ends
        if current is None or current is self.root or (ends and next(reversed(ends)) is current):
            return
        ends[current] = None
        ends.move_to_end(current)

    def _forget_program(self) -> None:
        """Forget the program that was used least recently; if there is only the current one, it leaves the trie."""
        if not self._ends:
            self._note_end()
            self.current = None
            return
        node, _ = self._ends.popitem(last=False)
        while not node.successors and node is not self.current and node is not self.root and node not in self._ends:
            node = self._remove(node)

    def _forget_below(self, node: TrieNode) -> None:
        """Forget a node and every program that goes through it."""
        self._remove(node)
        below = list(node.successors.values())
        while below:
            following = below.pop()
            below += following.successors.values()
            self.num_nodes -= 1
            self._ends.pop(following, None)

    def _remove(self, node: TrieNode) -> TrieNode:
        """Take a node from its parent, and give the parent."""
        parent = cast(TrieNode, node.parent)
        self._unlearn(node)
        del parent.successors[node.key]
        node.parent = None
        self.num_nodes -= 1
        self._ends.pop(node, None)
        return parent
