"""``python -m ragen`` is ``ragen``."""

import sys

from ragen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
