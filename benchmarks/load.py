"""`python -m benchmarks.load`: the load generator of `splitserve bench` (cluster/load/); address, model and rate are
given."""

from __future__ import annotations

import sys

from cluster.load.command import main

if __name__ == "__main__":
    sys.exit(main())
