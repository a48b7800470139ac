"""`python -m dp_sinkhorn`."""

import sys

from dp_sinkhorn.cli import main

if __name__ == "__main__":
    sys.exit(main())
