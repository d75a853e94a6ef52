"""The versions of PyTorch that koila runs on; importing this module checks the one that is installed.

Takes: `torch.__version__`. Gives: nothing, or an `ImportError` that says which versions are supported and how to get
one. It is a plain `ImportError`: koila's own errors are attributes of a package whose import has just failed, so that
nobody could name them in an `except`, and programs for which koila is optional catch `ImportError` anyway.
"""

import torch

from koila.errors import compose_message

SUPPORTED = ("2.13",)
"""Releases on which the whole suite has passed. Look at: the release notes, then run conformance and exactness."""
RECOMMENDED = "2.13.0"
"""The release that the error tells to install."""


def check_version(version: str) -> None:
    """Refuse a PyTorch that koila was not made for.

    >>> check_version("2.13.1+cpu")
    >>> check_version("2.12.0")
    Traceback (most recent call last):
    ImportError: koila supports PyTorch 2.13.x, and this is PyTorch 2.12.0
      try: pip install torch==2.13.0
    """
    if ".".join(version.partition("+")[0].split(".")[:2]) not in SUPPORTED:
        supported = ", ".join(f"{release}.x" for release in SUPPORTED)
        fact = f"koila supports PyTorch {supported}, and this is PyTorch {version}"
        raise ImportError(compose_message(fact, hint=f"pip install torch=={RECOMMENDED}"))


check_version(torch.__version__)
