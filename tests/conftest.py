"""What holds for all tests: one thread per process, so that processes share the cores and bits are comparable."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
