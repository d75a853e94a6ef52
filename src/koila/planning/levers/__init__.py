"""Levers: each takes a schedule or a plan and gives one that needs fewer bytes."""
