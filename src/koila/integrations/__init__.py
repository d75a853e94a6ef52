"""Conveniences for the ways in which people train; none is required (Rule 7).

*Takes* loaders and trainers of other libraries. *Gives* the same ones with lazy batches. A library is imported by its
own file here only: `koila.integrations.hf`, `koila.integrations.lightning`.
"""
