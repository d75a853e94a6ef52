"""Seeding without devices.

`torch.manual_seed` also seeds devices that are not there: CUDA, XPU and MTIA each keep the seed with the text of the
whole stack, for the day they are initialised. Under pytest that is milliseconds per call, and half of the time that
torch's operator samples take; it also grows for as long as the process lives.
"""

from __future__ import annotations

import torch


def seed_present_devices_only() -> None:
    """From now on `torch.manual_seed` leaves devices alone that this machine does not have."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None  # type: ignore[union-attr]
