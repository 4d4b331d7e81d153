"""Hostile clients against a proxy with API keys; see `tests/harness/hostile/campaign.py` for what is sent and checked.

python -m benchmarks.hostile [--requests 10000] [--seed 1] [--store sqlite|postgresql] [--exact-context] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.harness.hostile.campaign import HostileOutcome, run
from tests.harness.postgres import postgres_server


def main() -> None:
    """Print the outcome; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--exact-context", action="store_true", help="the upstream offers --enable-scale-out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        url = stack.enter_context(postgres_server()).url if options.store == "postgresql" else ""
        outcome = run(Path(folder), options.requests, options.seed, url, exact=options.exact_context)
    if options.json:
        print(json.dumps(asdict(outcome)))
    else:
        _print(outcome)
    sys.exit(bool(outcome.violations))


def _print(outcome: HostileOutcome) -> None:
    for kind, statuses in outcome.statuses.items():
        counts = "  ".join(f"{status}: {count}" for status, count in statuses.items())
        print(f"{kind:24} {sum(statuses.values()):6}  {counts}")
    print(f"{outcome.requests} requests in {outcome.seconds:.0f} s; {outcome.recorded} calls recorded and read back")
    print(
        f"5xx of the proxy: {len(outcome.own_5xx)}; leaks: {len(outcome.leaks)}; logged defects: {len(outcome.logged)}"
    )
    print(f"other broken promises: {len(outcome.broken)}")
    print(f"exact contexts: {outcome.spliced or 'not offered'}")
    print(f"resident MiB: {outcome.resident}; open files: {outcome.open_files}")
    for violation in dict.fromkeys(outcome.violations):
        print("VIOLATION", violation)


if __name__ == "__main__":
    main()
