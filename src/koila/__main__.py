"""`python -m koila` is the command `koila`."""

import sys

from koila.cli.main import main

sys.exit(main())
