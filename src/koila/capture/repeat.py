"""Repeating: a call that the last step made at the same place is matched, and nothing else is done about it.

*Takes* a call. *Gives* lazy results, or nothing if the call is not the next one of a known program: then it is recorded
by `koila.capture.record`, and the call after it may be matched again.

A call is matched if all that recording would look at is the same: the ambient state (the same `Context`), no transform,
no forward-mode AD, no hooks on saved tensors, no compiled code around it, and its arguments (see
`koila.capture.template`). What recording would do is then an entry of the log, from which a node can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from sys import _getframe
from typing import Any

from koila._scopes import moments
from koila._torch import throw_on_data_access
from koila._torch.transforms import is_watched
from koila.capture.log import Entry, Log
from koila.capture.pending import recorder
from koila.capture.template import Template
from koila.ir.ambient import current_context
from koila.ir.draws import draw
from koila.ir.prepass import PrePass
from koila.ir.source import user_frame
from koila.ir.tree import rebuild
from koila.ir.trie import TrieNode

MAX_ENTRIES = 4096
"""So many calls wait without nodes; what nobody can ask for is found out when nodes are made."""
_place = recorder.place
_entry: Callable[[tuple[Any, ...]], Entry] = partial(tuple.__new__, Entry)
"""An entry from its fields, without the Python layer of `NamedTuple`."""
NOT_KNOWN = object()
"""The call is not the next one of a known program."""


def repeat(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of a call that repeats the known program; `NOT_KNOWN` if it does not."""
    log = _place.log
    current = log.trie.current
    if current is None:
        return NOT_KNOWN
    followers = current.followers.get(func)
    if followers is None or len(log.entries) >= MAX_ENTRIES or is_watched():
        return NOT_KNOWN
    context, base = current_context(), log.base
    with log.lock:
        for node in followers:
            template: Template = node.template
            if template.context is context and template.first == log.count:
                captured = template.match(args, kwargs, template.constants, base)
                if captured is not None:
                    return _append(log, node, template, captured)
    return NOT_KNOWN


def _append(log: Log, node: TrieNode, template: Template, captured: tuple[Any, ...]) -> Any:
    specs, trie, makers = template.inference.draws, log.trie, template.makers
    draws = [draw(spec) for spec in specs] if specs else []
    if len(makers) == 1:  # As mostly.
        results: tuple[Any, ...] = (_result(log, log.base + template.first, *makers[0]),)
    else:
        results = tuple([_result(log, log.base + template.first + n, *maker) for n, maker in enumerate(makers)])
    frame = user_frame(_getframe(3))
    entry = _entry((template, captured, results, draws, next(moments), frame.f_code, frame.f_lasti))
    # An interrupt between two of these lines leaves a number without a call, or a call that nobody can ask for.
    log.count += len(results)
    if template.writes:
        log.writes = True
    node.used, trie.current = trie.program, node
    log.entries.append(entry)
    if template.kind is not None:
        return rebuild(template.kind, list(results))
    if results:
        return results[0]
    return captured[template.returned] if template.returned >= 0 else None


def _result(log: Log, name: int, make: Callable[[], Any], prepass: PrePass) -> Any:
    """A lazy tensor whose call has no node yet."""
    wrapper = make()
    throw_on_data_access(wrapper)
    wrapper._log, wrapper._name, wrapper._prepass = log, name, prepass
    return wrapper
