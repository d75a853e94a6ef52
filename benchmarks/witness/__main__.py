"""The subprocess's side of `call_outside`: runs one function and prints its answer."""

from __future__ import annotations

import json
import sys

from benchmarks.witness import MARK, load


def main() -> None:
    args, kwargs = json.loads(sys.argv[2])
    print(MARK + json.dumps(load(sys.argv[1])(*args, **kwargs)), flush=True)


main()
