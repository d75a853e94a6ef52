"""The command line `koila`; each command is a file.

*Takes* what is typed after `koila`. *Gives* text for people, and an exit code (`koila.cli.exits`).
"""
