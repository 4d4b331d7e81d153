"""Linking without ids: precision and recall per kind of adversarial traffic.

Traffic: `tests/harness/linking/kinds.py` and `dialects.py`. Metrics: `tests/harness/linking/score.py`. Exits with 1 if
precision is below 99.9%, or if recall or parents are below 99.9% for traffic that contains enough evidence to link.

    python -m benchmarks.linking [--quick] [--seed 1] [--only WORD] [--workers 1] [--machines 1]
        [--store sqlite] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from tests.harness.linking.campaign import LinkingResult, measure


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the agents")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="WORD", help="only kinds whose name contains WORD")
    parser.add_argument("--workers", type=int, default=1, help="of the proxy; with several, each call may meet any")
    parser.add_argument("--machines", type=int, default=1, help="proxies with a coordinator in common, called in turn")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite", help="one of its own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    results = measure(
        quick=options.quick,
        seed=options.seed,
        only=options.only,
        workers=options.workers,
        machines=options.machines,
        database=options.store,
    )
    if options.json:
        print(json.dumps([asdict(one.score) | {"evidence": one.evidence, "good": one.good} for one in results]))
    else:
        _print(results, time.perf_counter() - started)
    sys.exit(0 if all(one.good for one in results) else 1)


def _print(results: Sequence[LinkingResult], seconds: float) -> None:
    print(f"{'kind':26} {'runs':>5} {'found':>6} {'calls':>6} {'precision':>9} {'recall':>8} {'parents':>8}  linked by")
    for one in results:
        score = one.score
        ways = ", ".join(f"{way} {count}" for way, count in sorted(score.linked_by.items(), key=lambda way: -way[1]))
        recall = f"{score.recall:8.2%} {score.parents:8.2%}" if one.evidence else f"({score.recall:.2%}) {'':8}"
        line = f"{score.kind:26} {score.runs:5} {score.trajectories:6} {score.calls:6} {score.precision:9.2%} {recall}"
        print(f"{line}  {ways}{'' if one.good else '   <- BAD'}{f' missing {score.missing}' if score.missing else ''}")
    print(f"{sum(one.score.calls for one in results)} calls, {seconds:.0f} s")


if __name__ == "__main__":
    main()
