"""Adapter swaps under load; see `tests/harness/swaps/campaign.py`. With `--vllm real`: vLLM and the tiny policy.

python -m benchmarks.swaps [--vllm scripted|real] [--swaps 100] [--pause 0.2] [--steady 30] [--agents 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.harness.swaps.campaign import VersionMaker, run, scripted


@contextmanager
def real(folder: Path) -> Iterator[tuple[str, VersionMaker]]:
    """Yield the URL of a real vLLM that serves the tiny policy, and a learner that trains its versions."""
    from tests.harness.swaps.real_versions import POLICY, DrawnRowsLearner
    from tests.harness.vllm.engine import vllm

    with vllm(POLICY, folder / "vllm.log", "--dtype", "float32", max_model_len=1024) as url:
        yield url, DrawnRowsLearner()


def main() -> None:
    """Print the figures; exit with 1 if a call failed or an answer or trajectory mixed two versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", choices=("scripted", "real"), default="scripted")
    parser.add_argument("--agents", type=int, default=8, help="concurrent agents")
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two swaps")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds without swaps, in total")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    serve = real if options.vllm == "real" else scripted
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options.swaps, options.pause, options.steady, options.agents, serve=serve)
    if options.json:
        print(json.dumps(asdict(outcome) | {"ratio": outcome.ratio}))
    else:
        for name, value in asdict(outcome).items():
            print(f"{name:18} {value:.1f}" if isinstance(value, float) else f"{name:18} {value}")
        print(f"p99 while versions are swapped, divided by p99 without swaps: {outcome.ratio:.2f}")
    sys.exit(bool(outcome.failed or outcome.mixed_answers or outcome.mixed_trajectories))


if __name__ == "__main__":
    main()
