"""Several processes that train as one: a program that tests start with the cases that they want.

The libraries are imported once: every case forks its two processes from this one, and all cases run side by side. Each
process writes what it logged, and its exit code as the last line, into a file `CASE-RANK`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ratchet.trainer.errors import CheckpointError, RowError, TrainerError
from ratchet.trainer.learner import distributed
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.ports import free_port
from tests.harness.trainer.tiny import build_row, build_rows

if TYPE_CHECKING:
    from ratchet.trainer.learner.agent_state import AgentState

# Three micro-batches and more: one process has fewer of them than the other.
SETTINGS = LearnerSettings(threads=1, token_budget=120, steps_per_round=2, loss_type="grpo", beta=0.01)
MOST_SECONDS = 120


class Strange(Exception):
    """Nothing that a trainer knows of."""


class Unlucky(LearnerHost):
    """Meets the error of its case when it would learn from a second round, or in the operation that the case names."""

    case = ""

    def _train(self, state: AgentState, rows: Sequence[TokenRow], rate_scale: float) -> RoundReport:
        if state.step and not self.case.endswith(("_in_score", "_in_save")):
            meet_error(self.case)
        return super()._train(state, rows, rate_scale)

    def score(self, *arguments: Any, **named: Any) -> list[tuple[float, ...]]:
        if self.case.endswith("_in_score"):
            meet_error(self.case.removesuffix("_in_score"))
        return super().score(*arguments, **named)

    def save(self, *arguments: Any) -> None:
        if self.case.endswith("_in_save"):
            meet_error(self.case.removesuffix("_in_save"))
        super().save(*arguments)


class UnluckyLeader(distributed.LeadingHost, Unlucky):
    """The leader, with the error of its case."""


def meet_error(case: str) -> None:
    if case.endswith("refuses"):
        raise RowError("a row that only I refuse")
    if case.endswith("breaks"):
        raise Strange("nobody knows it")
    if case.endswith("is_killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if case.endswith("has_no_memory"):
        most = psutil.Process().memory_info().data + 20_000_000  # not enough for three of the round's tensors
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def learn(model: str, folder: Path) -> int:
    """Learn two rounds without a leader, and write what came of it."""
    rank = os.environ.get("RANK", "0")
    learner = Learner(model, SETTINGS)
    reports = [learner.train_round(build_rows(count, seed=count)) for count in (7, 3)]
    learner.save(folder / "0001")
    names = ["loss", "grad_norm", "tokens_trained", "entropy", "tokens_compared", "logprob_abs_diff_mean"]
    names += [
        "rows_rejected",
        "weight_change",
        "learning_rate",
        "approx_kl",
        "logprob_change_abs_mean",
        "logprob_change_positive_mean",
    ]
    found = {name: [getattr(report, name) for report in reports] for name in names}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    return 0


def lead(line: distributed.FollowerChannel, case: str, model: str, folder: Path) -> int:
    settings = LearnerSettings(threads=1, token_budget=1 << 15, share_prefixes=False)
    try:
        learner = Learner(model, settings, make_host=partial(UnluckyLeader, line))
        learner.train_round(build_rows(2))
        row = build_row(7)
        wide = TokenRow("wide", row.ids * 8, row.mask * 8, row.logprobs * 8, 1.0)
        with contextlib.suppress(RowError):
            learner.train_round([wide] * (400 if case.endswith("memory") else 2))
        learner.score(build_rows(3))
        with contextlib.suppress(CheckpointError):
            if case == "all_cannot_save":
                learner.save(Path("/proc/nowhere"))
        learner.save(folder / case / "0001")
        learner.load(None, settings)
        learner.train_round(build_rows(2))
        learner.save(folder / case / "0002")
    except TrainerError as lost:
        logging.info("%s: %s", type(lost).__name__, lost)
        return 1
    finally:
        line.close()
    return 0


def one(case: str, model: str, folder: Path) -> int:
    """Be one of the processes of a case; return the exit code."""
    if case == "learn":
        return learn(model, folder)
    # Where all meet an error, a process that the machine keeps waiting must be waited for.
    line = distributed.FollowerChannel(error_timeout=timedelta(seconds=MOST_SECONDS if case.startswith("all") else 2))
    unlucky = ("leader" if distributed.is_leader() else "follower", "all")
    Unlucky.case = case if case.startswith(unlucky) else ""
    if distributed.is_leader():
        return lead(line, case, model, folder)

    def made(base_model: str, process: LearnerProcessSettings, **where: Any) -> LearnerHost:
        return Unlucky(base_model + ("-" if case == "follower_has_no_model" else ""), process, **where)

    return distributed.follow(line, made)


def forked(
    does: Callable[[], int], log_path: Path, environment: dict[str, str], most_seconds: int = MOST_SECONDS
) -> int:
    """Start a process that does it; return its id."""
    if child := os.fork():
        return child
    os.environ.update(environment)
    signal.alarm(most_seconds)
    with log_path.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        logging.basicConfig(level=logging.INFO, stream=log)
        code = 3
        try:
            code = does()
        except BaseException:  # noqa: BLE001 - a child must not go on as its parent
            traceback.print_exc(file=log)
        log.write(f"\nended with {code}\n")
    os._exit(code)


def main(model: str, folder: Path, cases: Sequence[str]) -> None:
    children = []
    for case in cases:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        for rank in ("0", "1"):
            own = {"RANK": rank, "LOCAL_RANK": rank, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
            children.append(forked(partial(one, case, model, folder), folder / f"{case}-{rank}", meeting | own))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    from ratchet.trainer.learner import lora  # noqa: F401 - with all that it imports, before the forks

    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
