"""Numbers in sentences.

*Takes* a number and a noun. *Gives* both, with an s where there are several.
"""


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "call"), counted(2, "call")
    ('1 call', '2 calls')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
