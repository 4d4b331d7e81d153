"""Exactly-once training under `kill -9`; see `tests/harness/exactly_once/campaign.py` for what is checked.

python -m benchmarks.exactly_once [--kills 100] [--store sqlite|postgresql] [--seed 1] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from benchmarks.outcomes import print_and_exit
from tests.harness.exactly_once.campaign import run
from tests.harness.postgres import postgres_server


def main() -> None:
    """Print the outcome; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=["sqlite", "postgresql"], default="postgresql")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the run's files there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres_server()) if options.store == "postgresql" else None
        outcome = run(options.folder or Path(temporary), options.kills, server, options.seed)
    print_and_exit(outcome, as_json=options.json)


if __name__ == "__main__":
    main()
