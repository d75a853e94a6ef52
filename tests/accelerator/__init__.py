"""Tests on a simulated accelerator; see README.md."""
