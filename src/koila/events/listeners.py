"""Who listens to events.

*Takes* subscriptions, and events from every stage. *Gives* each event to whoever wants its kind.
"""

import threading
from collections.abc import Callable
from typing import TypeAlias

from koila.events.kinds import Event

Listener: TypeAlias = Callable[[Event], None]

_lock = threading.Lock()
_subscriptions: dict[object, tuple[Listener, tuple[type, ...]]] = {}
_listeners: tuple[tuple[Listener, tuple[type, ...]], ...] = ()
"""Each with the kinds of events that it wants; an empty tuple for all of them."""
_heard: frozenset[type] | None = frozenset()
"""The kinds of events that anybody wants; None for all of them."""


def subscribe(listener: Listener, *kinds: type) -> Callable[[], None]:
    """Have `listener` called with every event, in the thread that emits it, until the result is called.

    Args:
        listener: called with each event; what it raises goes to the emitter.
        kinds: the classes of events that it wants; all of them if none is named.

    Returns:
        A function that ends this subscription; a second call of it does nothing.

    >>> from koila.events.kinds import Forced
    >>> seen = []
    >>> unsubscribe = subscribe(seen.append)
    >>> emit(Forced("item", "train.py:41"))
    >>> unsubscribe()
    >>> seen
    [Forced(why='item', site='train.py:41')]
    """
    token = object()
    with _lock:
        _subscriptions[token] = listener, kinds
        _publish()

    def unsubscribe() -> None:
        with _lock:
            _subscriptions.pop(token, None)
            _publish()

    return unsubscribe


def _publish() -> None:
    # A new tuple each time: `emit` walks over the one it found, without a lock.
    global _listeners, _heard
    _listeners = tuple(_subscriptions.values())
    wanted = [kinds for _, kinds in _listeners]
    _heard = None if () in wanted else frozenset(kind for kinds in wanted for kind in kinds)


def emit(event: Event) -> None:
    """Hand an event to every listener, in the order of subscription."""
    for listener, kinds in _listeners:
        if not kinds or type(event) in kinds:
            listener(event)


def is_heard(kind: type) -> bool:
    """Whether anybody wants events of a class."""
    return _heard is None or kind in _heard
