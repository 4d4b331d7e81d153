"""One of several processes that train together: what `accelerate launch` starts in tests.

Each process sees all rows and calls the same methods; the first one writes what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.trainer.tiny import build_rows
from trainer.learning.learner import Learner
from trainer.learning.learner_settings import LearnerSettings


def main(model: str, folder: Path, settings: LearnerSettings) -> None:
    rank = os.environ.get("RANK", "0")
    learner = Learner(model, settings, workdir=folder / f"work{rank}")
    reports = [learner.train_round(build_rows(count, seed=count)) for count in (7, 3)]
    learner.save(folder / "0001")
    (folder / f"{rank}.json").write_text(
        json.dumps(
            {
                "loss": [report.loss for report in reports],
                "norm": [report.grad_norm for report in reports],
                "tokens": [report.tokens_trained for report in reports],
                "entropy": [report.entropy for report in reports],
                "compared": [report.tokens_compared for report in reports],
                "mismatch": [report.logprob_abs_diff_mean for report in reports],
                "rejected": [report.rows_rejected for report in reports],
                "change": [report.weight_change for report in reports],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), LearnerSettings(**json.loads(sys.argv[3])))
