"""What the learner service costs beside a learner in process: rounds, scores and opens of a tiny model, in turns.

    python -m benchmarks.learner_service [ROUNDS]

Prints the median seconds of each operation in process and over HTTP, and their ratio. A tiny model is the worst case:
the service's cost does not grow with the model, only with the rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_client import AgentLearner
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.learner_process import LearnerProcess
from tests.harness.trainer.tiny import build_rows, build_tiny_model

_AGENT = "mail"
_ROWS = 32


def main(rounds: int) -> None:
    """Measure and print."""
    settings = LearnerSettings(learning_rate=1e-3, threads=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model")
        served = LearnerProcess(folder / "learner", model)
        try:
            host = LearnerHost(str(model), LearnerProcessSettings(threads=1))
            host.open(_AGENT, settings, None)
            eventually(served.is_ready, 240)
            remote = AgentLearner(served.connection, _AGENT, settings)
            saved = served.checkpoints / _AGENT / "checkpoints" / "0001"
            remote.train_round(build_rows(_ROWS))
            remote.save(saved)
            print(json.dumps(_measure(host, remote, settings, saved, rounds), indent=2))
        finally:
            served.end()
            served.connection.close()


def _measure(
    host: LearnerHost, remote: AgentLearner, settings: LearnerSettings, saved: Path, rounds: int
) -> dict[str, dict[str, float]]:
    rows = build_rows(_ROWS)
    ids = [row.ids for row in rows]
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "train": (lambda: host.train_round(_AGENT, rows), lambda: remote.train_round(rows)),
        "score": (lambda: host.score(_AGENT, ids), lambda: remote.score(ids)),
        "open": (lambda: host.open(_AGENT, settings, saved), lambda: remote.load(saved, settings)),
    }
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"in_process": [], "service": []})
    for _ in range(rounds):
        for verb, (own, over_http) in pairs.items():
            for where, run in (("in_process", own), ("service", over_http)):
                began = time.perf_counter()
                run()
                seconds[verb][where].append(time.perf_counter() - began)
    found: dict[str, dict[str, float]] = {}
    for verb, times in seconds.items():
        medians = {where: median(values) for where, values in times.items()}
        found[verb] = {**medians, "ratio": medians["service"] / medians["in_process"]}
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
