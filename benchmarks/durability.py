"""Durability under `kill -9` and database outages; see `tests/harness/durability/campaign.py` for what is checked.

python -m benchmarks.durability [--kills 200] [--store sqlite|postgresql] [--outages 2] [--seconds 20] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from benchmarks.outcomes import print_and_exit
from tests.harness.durability.campaign import run
from tests.harness.postgres import postgres_server


def main() -> None:
    """Print the outcome; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--outages", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of an outage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres_server()) if options.store == "postgresql" else None
        outcome = run(Path(folder), options.kills, options.outages, options.seconds, server, options.seed)
    print_and_exit(outcome, as_json=options.json)


if __name__ == "__main__":
    main()
