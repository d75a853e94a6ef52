"""The exit codes of `koila`.

*Takes* nothing. *Gives* numbers that scripts around `koila` can rely on.
"""

OK = 0
"""It worked. `koila run` gives the script's own code, whatever it is."""
FAILED = 1
"""The script raised an exception, as with python; or `koila doctor` found that koila does not work here."""
USAGE = 2
"""What was typed cannot be understood, or a file is not there."""
REFUSED = 3
"""The budget cannot be met; nothing of that step was run."""
INTERRUPTED = 130
"""Somebody pressed Ctrl-C."""
