"""One process of a learner that compares itself with the others and ends; the launcher's variables say which it is.

python -m tests.harness.trainer.learner_member VERSION WEIGHTS
"""

from __future__ import annotations

import os
import sys

from ratchet.trainer.errors import LearnerRefused
from ratchet.trainer.learner_service.process import LearnerProcessIdentity, compare_processes


def main(version: str, weights: str) -> int:
    """Return 0 if all processes are alike, 1 if not."""
    machine = os.environ["MACHINE"]
    try:
        compare_processes(LearnerProcessIdentity(machine, version, "base", {"weights": weights}), os.environ)
    except LearnerRefused as refusal:
        print(f"{machine} refused: {refusal}", flush=True)
        return 1
    print(f"{machine} is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
