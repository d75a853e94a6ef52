"""A sample of the audit of operators; `python -m tests.accelerator.audit` looks at all architectures."""

from __future__ import annotations

import pytest

from tests.accelerator.audit import audited, is_passed, report

pytestmark = pytest.mark.filterwarnings("ignore")  # Models of transformers call what torch deprecates.


@pytest.mark.parametrize("name", ["distilbert", "resnet"])
def test_an_architecture_is_cut_as_on_the_cpu(name: str) -> None:
    row = audited(name)
    assert is_passed([row]), "\n".join(report([row]))
