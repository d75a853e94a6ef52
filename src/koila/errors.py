"""The exceptions that koila raises, all below one root.

    KoilaError
    ├── CaptureError       a call that cannot be recorded
    ├── StaleInputError    an input changed between the recording of an operation and its run
    ├── AnalysisError      a traced program that breaks an invariant of the calculus
    ├── BudgetError        no plan fits; also a MemoryError
    ├── ExecutionError     a run that failed; nothing was committed
    └── DelegateError      a backend that cannot lower or run its segment

`KoilaWarning`, a `UserWarning`, is what koila says about a line that does not do what its author thinks it does.

Takes: the fact with its numbers and units, the node with the user's file:line, one way out.
Gives: exceptions that render these three parts and keep them as fields.
"""


def compose_message(fact: str, where: str | None = None, hint: str | None = None) -> str:
    """Join the three parts of a message, leaving out the ones that are missing.

    >>> print(compose_message("needs 5.2 GiB, allowed 4.0 GiB", "softmax, train.py:41", 'budget="5.3GiB"'))
    needs 5.2 GiB, allowed 4.0 GiB
      at: softmax, train.py:41
      try: budget="5.3GiB"
    """
    lines = [fact]
    if where is not None:
        lines.append(f"  at: {where}")
    if hint is not None:
        lines.append(f"  try: {hint}")
    return "\n".join(lines)


class KoilaError(Exception):
    """The root of all exceptions of koila.

    The parts may be completed while the exception travels: a low level raises the bare fact, a higher one sets
    ``where`` or ``hint`` once and raises it again.

    Args:
        fact: what is the case, with numbers and units.
        where: the node and the user's file:line.
        hint: one way out.
    """

    fact: str
    """What is the case."""
    where: str | None
    """The node and the user's file:line."""
    hint: str | None
    """One way out."""

    def __init__(self, fact: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(fact)
        self.fact = fact
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return compose_message(self.fact, self.where, self.hint)


class CaptureError(KoilaError):
    """A call that cannot be recorded, or a recorded value that is no longer there."""


class StaleInputError(KoilaError):
    """An input of a recorded operation was changed before the operation ran (Rule 5); ``where`` names both lines.

    Methods of a tensor that write to it are seen before they do, and so is whoever reads its ``data``: what is pending
    on it runs first. This error is for changes that are seen afterwards only (``out=``, ``torch._foreach_*``, C++), and
    for values that were computed once and were too large to be kept.
    """


class AnalysisError(KoilaError):
    """A traced program that breaks an invariant: a mutable operator left, a shape its type does not predict."""


class BudgetError(KoilaError, MemoryError):
    """No plan fits into the budget (Rule 2); raised before anything runs.

    Args:
        fact: what is the case, with numbers and units.
        where: the tensor that stands in the way and the user's file:line.
        hint: one way out.
        needed_bytes: the smallest budget that the planner can meet, in bytes; 0 if it is not known.
        allowed_bytes: the budget that was given, in bytes; 0 if it is not known.
    """

    needed_bytes: int
    """The smallest budget that the planner can meet, in bytes; exactly this one is accepted."""
    allowed_bytes: int
    """The budget that was given, in bytes."""

    def __init__(
        self,
        fact: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        needed_bytes: int = 0,
        allowed_bytes: int = 0,
    ) -> None:
        super().__init__(fact, where=where, hint=hint)
        self.needed_bytes = needed_bytes
        self.allowed_bytes = allowed_bytes


class ExecutionError(KoilaError):
    """A run that failed; gradients, buffers and generators are as they were (Rule 4)."""


class DelegateError(KoilaError):
    """A backend that cannot lower or run the segment that it was given."""


class KoilaWarning(UserWarning):
    """A line of the user's that has no effect, or not the one it seems to have; said once per place."""
