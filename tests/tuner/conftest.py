"""Fixtures of the tuner's tests: a scripted vLLM, a proxy before it, their store, a small task set, a runner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.operation_records import Tuning
from ratchet.store.store import Store
from ratchet.trainer.tasks import Task, TaskSet
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.settings import TunerSettings
from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.proxy.running_proxy import Proxy
from tests.proxy.conftest import proxy, scripted, start, vllm, vllm_url

WORKFLOWS = "tests.harness.tuner.workflows"
ALIAS = "agent"


__all__ = ["proxy", "scripted", "start", "vllm", "vllm_url"]  # fixtures


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """A task set of eight questions, of which the scripted model answers every other one right."""
    rows = [
        {"question": f"What is {number} + 1? #say={number + 1 if number % 2 else 'unknown'}", "answer": str(number + 1)}
        for number in range(8)
    ]
    file = tmp_path / "sums" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def tasks(task_file: Path) -> list[Task]:
    """The tasks of the task set."""
    return list(TaskSet.open(task_file.parent).rows("train"))


@pytest.fixture
def reflection_server() -> Iterator[ScriptedReflectionModel]:
    """A scripted reflection model that proposes what helps."""
    with ScriptedReflectionModel() as scripted:
        yield scripted


@pytest.fixture
def tuning(store: Store) -> Tuning:
    """A run of the tuner that rollouts can belong to."""
    return store.tunings.begin("eval", ALIAS, {})


@pytest.fixture
def runner(store: Store, proxy: Proxy) -> Callable[..., RolloutRunner]:
    """Make a runner of one of the test's workflows, or of any specification; `changes` are the tuner's settings."""

    def make(workflow: str = "ask", proxy_url: str = proxy.url, **changes: Any) -> RolloutRunner:
        spec = f"{WORKFLOWS}:{workflow}" if workflow.isidentifier() else workflow
        return RolloutRunner(store, proxy_url, None, load_workflow(spec), TunerSettings(**changes), alias=ALIAS)

    return make


def jobs_of(tasks: Sequence[Task], attempts: int = 1, **values: Any) -> list[RolloutJob]:
    """Return the jobs of so many attempts at each task."""
    return [RolloutJob(task, attempt, **values) for task in tasks for attempt in range(attempts)]
