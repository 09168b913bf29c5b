"""`python -m client`: see client.cli."""

import sys

from client.cli import main

if __name__ == "__main__":
    sys.exit(main())
