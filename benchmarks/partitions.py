"""Two machines that fail under load: network cuts and `kill -9`, with PostgreSQL between them, checked in the store.

`tests/harness/partitions/` has the campaign: `campaign.py` what runs, `faults.py` what fails, `verdict.py` what must
hold. The machines and the database are network namespaces, which needs root; without it they are processes of one
machine, and nothing is cut: the output says which. Exits with 1 if an answered call is lost, stored twice, linked
wrongly without a mark, or merged.

    python -m benchmarks.partitions [--quick] [--kills 100] [--seconds 0] [--seed 1] [--one-coordinator] [--json]
    python -m benchmarks.partitions --fault coordinator --kills 3 --calm 60     # what one failure costs
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.outcomes import print_and_exit
from tests.harness.partitions.campaign import run
from tests.harness.partitions.faults import KINDS


def main() -> None:
    """Print the outcome; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 kills and shorter failures: about a minute")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0, help="of failures, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="of each machine")
    parser.add_argument("--agents", type=int, default=6, help="that call at once")
    parser.add_argument("--only", default="", metavar="WORD", help="only kinds of traffic whose name contains WORD")
    parser.add_argument("--fault", choices=KINDS, help="only this kind, one at a time; --kills says how many")
    parser.add_argument("--calm", type=float, metavar="SECONDS", help="without a fault, after each  [default: 1 to 5]")
    parser.add_argument("--one-coordinator", action="store_true", help="on the first machine, without a standby")
    parser.add_argument("--folder", type=Path, help="keep journals and logs there; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it started, as Ctrl-C does
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = run(
            folder,
            kills=8 if options.quick else options.kills,
            seconds=options.seconds,
            seed=options.seed,
            standby=not options.one_coordinator,
            workers=options.workers,
            agents=options.agents,
            scale=0.3 if options.quick else 1.0,
            only=options.only,
            fault=options.fault,
            calm_seconds=options.calm,
        )
    print_and_exit(outcome, as_json=options.json)


if __name__ == "__main__":
    main()
