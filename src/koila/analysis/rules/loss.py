"""Rules for losses that stay whole operators after decomposition: those without a reduction.

*Takes* calls of loss operators. *Gives* the table `ROWS`; a loss with a reduction is decomposed, or runs whole.
"""

from __future__ import annotations

from typing import Any

import torch

from koila.analysis.ruling import Rule

aten = torch.ops.aten

ROWS: dict[Any, Rule] = {}
