"""Measurements: bytes of a step, and time as a ratio to eager in one process."""
