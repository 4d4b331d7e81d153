"""A program for an environment with verifiers: runs the first tasks of a set once each and prints the rollouts as JSON.

Run alone: `python verifiers_rollouts.py STORE PROXY_URL SOURCE COUNT`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from ratchet.store.store import open_store
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.settings import TunerSettings
from ratchet.tuner.tasks import open_source

WORKFLOW = "ratchet.environments.verifiers:workflow"
ALIAS = "agent"


def main(store_url: str, proxy_url: str, source: str, count: str) -> None:
    """Print the rollouts, and the rows."""
    store = open_store(store_url)
    tuning = store.tunings.begin("eval", ALIAS, {})
    tasks = list(open_source(source).rows("train", int(count)))
    runner = RolloutRunner(store, proxy_url, None, load_workflow(WORKFLOW), TunerSettings(max_retries=0), alias=ALIAS)
    made = asyncio.run(runner.run([RolloutJob(task) for task in tasks], tuning.id))
    store.close()
    found = [
        {"id": one.id, "row": task.row, "reward": one.reward, "metrics": one.metrics, "failure": one.failure,
         "response": one.response}
        for one, task in zip(made, tasks, strict=True)
    ]  # fmt: skip
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
