"""The backends that come with koila, each loaded when `koila.delegates.get_backend` is first asked for it.

Takes: a graph without state.
Gives: a program for it.
"""
