"""Who listens to events.

*Takes* subscriptions, and events from every stage. *Gives* each event to whoever wants its kind.
"""

import threading
from collections.abc import Callable
from typing import TypeAlias

from koila.events.kinds import Event

Listener: TypeAlias = Callable[[Event], None]

_lock = threading.RLock()  # Making a tuple may run a finalizer, which may emit something.
_subscriptions: dict[object, tuple[Listener, tuple[type, ...]]] = {}
_listeners: tuple[tuple[Listener, tuple[type, ...]], ...] = ()
"""Each with the kinds of events that it wants; an empty tuple for all of them."""
_wanting: dict[type, tuple[Listener, ...]] = {}
"""By kind of event who wants it, in the order of subscription; found when the first one comes."""


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
    # New ones each time: `emit` walks over what it found, without a lock.
    global _listeners, _wanting
    _listeners, _wanting = tuple(_subscriptions.values()), {}


def emit(event: Event) -> None:
    """Hand an event to every listener, in the order of subscription."""
    kind = type(event)
    for listener in _wanting[kind] if kind in _wanting else _find(kind):
        listener(event)


def _find(kind: type) -> tuple[Listener, ...]:
    with _lock:  # Else a subscription that comes between would be forgotten.
        found = _wanting[kind] = tuple([listener for listener, kinds in _listeners if not kinds or kind in kinds])
    return found


def is_heard(kind: type) -> bool:
    """Whether anybody wants events of a class."""
    return bool(_wanting[kind] if kind in _wanting else _find(kind))
