"""`ratchet.gather` and `ratchet.train`: groups of a caller's rollouts, scored, trained on request and only then."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest

import ratchet
from examples import gather_and_train
from ratchet.store.states import GroupState, TrajectoryState
from ratchet.store.store import Store
from ratchet.tuner.weights.trajectory_groups import read_given
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.cli.project import ROOT, Project
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.tiny import build_tiny_model
from tests.harness.trainer.whole_circle import proxy_before, trainer_of
from tests.harness.tuner.scripted_versions import agent

pytestmark = pytest.mark.slow

SCENARIOS = [{"question": "one? #say=so"}, {"question": "two? #say=so"}]
Scored = ratchet.ScoredTrajectory
CALL = ratchet.SampledCall([1, 2, 3], [4, 5], [-6.2, -6.3], {"temperature": 1.0})


class VaryingVllm(ScriptedVllm):
    """Says something else every time, unless the question scripts the answer."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def _words(self, script: Mapping[str, str]) -> str:
        return super()._words(script) if "say" in script else "so " * next(self._numbers)


@pytest.fixture
def served(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project whose proxy runs elsewhere, in the current folder."""
    monkeypatch.chdir(project.folder)
    with proxy_before(VaryingVllm(), project.folder) as url:
        project.write(model="agent", store=f"sqlite:///{project.folder / 'store.db'}", tuner={"proxy_url": url})
        yield project


@contextmanager
def training(folder: Path) -> Iterator[tuple[Store, Callable[[], None]]]:
    """A trainer whose own judge finds no reward; the second value makes it work from then on."""
    tiny = build_tiny_model(folder / "tiny", hidden=32, layers=1)
    settings: dict[str, Any] = {
        "judge": {"kind": "workflow"}, "seal_after_idle_seconds": 0.1,
        "groups_per_round": 8,
    }  # fmt: skip
    stopped, failures = threading.Event(), list[BaseException]()
    with trainer_of(folder, tiny, **settings) as (controller, store, _):

        def step() -> None:
            try:
                while not stopped.is_set():
                    controller.step(time.time())
                    stopped.wait(0.05)
            except BaseException as error:  # noqa: BLE001  raised again below
                failures.append(error)

        thread = threading.Thread(target=step)
        try:
            yield store, thread.start
        finally:
            stopped.set()
            if thread.ident is not None:
                thread.join()
    assert failures == []


def rank(body: dict[str, Any]) -> tuple[int, Any]:
    """The answer of a RULER model."""
    content = body["messages"][-1]["content"]
    labels = [one["trajectory_id"] for one in json.loads(content[content.index("{") :])["attempts"]]
    return says({"scores": [{"trajectory_id": one, "explanation": "e", "score": int(one) / 10} for one in labels]})


def odd(number: itertools.count[int]) -> Callable[..., ratchet.Judgement]:
    """A judge that gives every second attempt a point."""
    return lambda response: ratchet.Judgement(float(next(number) % 2), explanation=f"said {response}")


def test_the_documents_first_rollout_is_judged_in_twelve_lines_and_leaves_no_process(project: Project) -> None:
    project.make_trainable()
    page = (ROOT / "docs" / "python.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in program.splitlines() if line]) <= 12
    written = program.replace("Qwen/Qwen2.5-0.5B-Instruct", str(project.folder / "tiny"))
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", written.replace("2 + 3?", "2 + 3? #say=5")], cwd=project.folder, check=False,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "(1.0, 1.0)\n", done.stderr
    assert "vllm: ready" in done.stderr
    assert list((project.state / "run").glob("*.pid")) == []


def test_gathered_groups_are_trained_with_the_rewards_of_the_caller_and_not_before(served: Project) -> None:
    async def workflow(task: Mapping[str, Any], base_url: str, model: str) -> ratchet.WorkflowOutput:
        return ratchet.WorkflowOutput(await agent(task, base_url, model), metrics={"turns": 1})

    scenarios = [{"question": "one?"}, {"question": "two?"}]  # to which no two answers are equal
    groups = ratchet.gather(workflow, scenarios, odd(itertools.count()), attempts=2, step=3)
    assert [group.scenario for group in groups] == scenarios
    assert [sorted(group.rewards, key=float) for group in groups] == [[0.0, 1.0]] * 2  # type: ignore[arg-type]
    members = [one for group in groups for one in group.trajectories]
    texts = {str(one.messages[-1]["content"]) for one in members}
    assert len(texts) == 4
    assert {one.explanation for one in members} == {f"said {answer}" for answer in texts}
    assert {json.dumps(one.metrics) for one in members} == {'{"turns": 1.0}'}
    assert ratchet.gather(resume=groups[0].run) == groups, "as after a restart of the notebook"

    with training(served.folder) as (store, start):
        start()
        sealed = {one.id: TrajectoryState.SEALED for one in members}
        eventually(lambda: {one.id: store.trajectories.get(one.id).state for one in members} == sealed)
        assert store.groups.page() == [], "the trainer leaves gathered trajectories alone"
        status = served.run("status").stdout
        assert "trajectories  0 open (more calls may follow), 0 sealed (complete, waiting for a group)" in status
        assert "4 gathered (trained only on request, with ratchet.train)" in status
        trained = ratchet.train([groups[0], groups[1].with_rewards([0.5, 0.5])], timeout=300)
        assert (trained.name, trained.groups, trained.trajectories) == ("agent@1", 1, 2)
        assert trained.state == "live"
        assert trained.left_out == {"equal rewards in the group": 2}
        assert trained.metrics["reward"] == 0.5
        states = {one.id: store.trajectories.get(one.id).state for one in members}
        assert [states[one.id] for one in groups[0].trajectories] == [TrajectoryState.TRAINED] * 2
        assert TrajectoryState.TRAINED not in {states[one.id] for one in groups[1].trajectories}
        verdicts = store.groups.verdicts([one.id for one in groups[0].trajectories])
        assert {name: one.score for name, one in verdicts.items()} == {
            one.id: one.reward for one in groups[0].trajectories
        }
        with pytest.raises(ratchet.TuningError, match="is trained: a trajectory is trained once"):
            ratchet.train([groups[0]])

        again = ratchet.train([groups[1]], timeout=300)  # what was left out is trained later
        assert (again.name, again.state, again.trajectories) == ("agent@2", "live", 2)


def test_a_call_that_ended_early_is_repeated_with_the_same_groups(served: Project) -> None:
    async def workflow(task: Mapping[str, Any], base_url: str, model: str) -> str:
        return await agent(task, base_url, model)

    groups = ratchet.gather(workflow, [{"question": "one?"}, {"question": "two?"}], odd(itertools.count()), attempts=2)
    with training(served.folder) as (store, start):
        with pytest.raises(TimeoutError, match="call it again with the same groups"):
            ratchet.train(groups[:1], timeout=0.5)  # the trainer has not begun
        (waiting,) = store.groups.page()
        assert waiting.state is GroupState.JUDGED
        with pytest.raises(ratchet.TuningError, match="is grouped"):
            ratchet.train([groups[0].with_rewards([0.25, 0.5])])
        start()
        trained = ratchet.train(groups, timeout=300)
        assert (trained.groups, trained.trajectories, trained.left_out) == (2, 4, {})
        assert len(store.groups.page()) == 2, "none was handed over twice"
        with pytest.raises(ratchet.TuningError, match="is trained: a trajectory is trained once"):
            ratchet.train(groups)


def test_token_ids_and_logprobs_of_another_program_are_trained(served: Project) -> None:
    longer = ratchet.SampledCall([1, 2, 3, 4, 5, 9], [6, 7, 8], [-6.2, -6.1, -6.3])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    good = Scored(1.0, calls=[CALL, longer], messages=talk)
    failed = Scored(None, failure="TimeoutError")
    group = ratchet.TrajectoryGroup([good, Scored(0.0, calls=[CALL]), failed])
    with training(served.folder) as (store, start):
        start()
        trained = ratchet.train([group], timeout=300)
        assert (trained.name, trained.trajectories) == ("agent@1", 2)
        assert trained.left_out == {"no reward": 1}
        assert (trained.metrics["rows"], trained.metrics["tokens_trained"]) == (2, 7), "two calls are one sequence"
        stored = {len(one.calls): one for one in map(store.trajectories.read, _ids(store))}
        assert stored[2].messages == tuple(talk)
        assert [call.context for call in stored[2].calls] == ["root", "exact"]
        assert {one.trajectory.version for one in stored.values()} == {0}


def test_the_documents_loop_trains_a_version_in_each_step(served: Project) -> None:
    model = ScriptedModel()
    model.answers = [rank] * 4
    rows = [{"question": f"number {place}"} for place in range(2)]
    (served.folder / "scenarios.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with model, training(served.folder) as (store, start):
        start()
        gather_and_train.main("scenarios.jsonl", f"{model.url}/v1", steps="2")
        assert [one.version for one in store.policies.all("agent")] == [0, 1, 2]
        assert {one.trajectory.version for one in map(store.trajectories.read, _ids(store))} == {0, 1}


async def test_ruler_scores_the_groups_in_a_running_event_loop(served: Project) -> None:
    model = ScriptedModel()

    model.answers = [rank] * 2
    answers = itertools.count()

    async def workflow(task: Mapping[str, Any], base_url: str, model: str) -> str:
        return await agent({"question": f"{task['question'].split()[0]} #say=word{next(answers)}"}, base_url, model)

    with model:
        judge = {"kind": "ruler", "base_url": f"{model.url}/v1", "model": "big"}
        groups = await ratchet.gather_async(workflow, SCENARIOS, judge, attempts=3, concurrency=2)
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert all(sorted(group.rewards, key=float) == [0.1, 0.2, 0.3] for group in groups)  # type: ignore[arg-type]


def test_rewards_are_given_one_for_each_trajectory_also_as_numbers_of_other_libraries() -> None:
    group = ratchet.TrajectoryGroup([Scored(float(n), calls=[CALL]) for n in range(4)])
    with pytest.raises(ValueError, match="2 rewards are given for the 4 trajectories of this group: give one for each"):
        group.with_rewards([1, 2])
    ((_, members),) = read_given([group.with_rewards(numpy.linspace(0, 1, 4, dtype=numpy.float32))]).groups  # type: ignore[arg-type]
    assert [float(one.reward or 0.0) for one in members] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_failed_rollout_stays_in_its_group_without_a_reward(served: Project) -> None:
    calls = itertools.count()

    async def workflow(task: Mapping[str, Any], base_url: str, model: str) -> ratchet.WorkflowOutput:
        if next(calls) == 1:
            raise ValueError("no such tool")
        return ratchet.WorkflowOutput(await agent(task, base_url, model), reward=1.0)

    (group,) = ratchet.gather(workflow, SCENARIOS[:1], attempts=3, concurrency=1)
    assert sorted(map(str, group.rewards)) == ["1.0", "1.0", "None"]
    (failed,) = (one for one in group.trajectories if one.reward is None)
    assert str(failed.failure).startswith("ValueError: no such tool")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([Scored(1.0, messages=[{"role": "user"}])], r"neither an id nor calls.*warm-start"),
        ([Scored(messages=[{"role": "user"}])] * 2, r"neither an id nor calls.*warm-start"),
        ([Scored(float("nan"), calls=[CALL])], "give a finite number"),
        ([Scored(1e300, calls=[CALL])], r"give a finite number from -1e\+09 to 1e\+09"),
        (
            [Scored(1.0, calls=[CALL], metrics={"turns": 1e300})],
            r"trajectories.0..metrics: component 'turns' is 1e\+300",
        ),
        (
            [Scored(1.0, calls=[dataclasses.replace(CALL, logprobs=[-1.0])])],
            "2 token_ids and 1 logprobs",
        ),
        ([Scored(1.0, calls=[dataclasses.replace(CALL, logprobs=[-1.0, 2.0])])], "at most 0"),
        ([Scored(1.0, calls=[dataclasses.replace(CALL, token_ids=[])])], "calls.0..token_ids"),
        ([Scored(1.0, "a"), Scored(0.0, "a")], "a is given 2 times"),
        ([Scored(1.0, calls=[CALL])] * 2, "2 of equal rewards in the group"),
        (
            [Scored(1.0, calls=[CALL]), Scored(calls=[CALL])],
            "1 of fewer than two rewards",
        ),
        (
            [Scored(1.0, "unknown"), Scored(0.0, calls=[CALL])],
            "unknown is not in this project",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(
    project: Project, monkeypatch: pytest.MonkeyPatch, group: list[Scored], message: str
) -> None:
    monkeypatch.chdir(project.folder)
    project.write(store="sqlite:///s.db", tuner={"proxy_url": "http://127.0.0.1:9"})  # nothing is called there
    with pytest.raises(ratchet.TuningError, match=message):
        ratchet.train([ratchet.TrajectoryGroup(group)])


def test_nothing_is_started_for_arguments_that_are_wrong(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    (project.folder / "ratchet.yaml").write_text(json.dumps({"proxy": project.content["proxy"]}))
    group = ratchet.TrajectoryGroup([Scored(float(n), calls=[CALL]) for n in range(2)])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: ratchet.gather(agent, "tasks"), r"ratchet.Tasks\('tasks'\)"),  # type: ignore[arg-type]
        (lambda: ratchet.gather(agent, []), "scenarios is empty"),
        (lambda: ratchet.gather(agent, [*SCENARIOS, {"question": "\ud83d"}]), r"scenarios\[2\] holds half of a surr"),
        (lambda: ratchet.gather(agent, SCENARIOS, attempts=1), "give 2 or more"),
        (lambda: ratchet.gather(agent, SCENARIOS), "base_model="),
        (lambda: ratchet.train([group]), "base_model="),
    ]
    for call, message in cases:
        with pytest.raises(ratchet.InvalidArgument, match=message):
            call()
    assert not project.state.exists()


def _ids(store: Store) -> list[str]:
    return [name for group in store.groups.page(state=GroupState.TRAINED) for name in group.members]


async def test_groups_are_scored_afterwards_by_any_judge(served: Project) -> None:
    async def workflow(task: Mapping[str, Any], base_url: str, model: str) -> str:
        return await agent({"question": "one?"}, base_url, model)

    async def fails_once(task: Mapping[str, Any], base_url: str, model: str) -> str:
        if next(calls) == 0:
            raise ValueError("no such tool")
        return await workflow(task, base_url, model)

    calls, model = itertools.count(), ScriptedModel()
    model.answers = [rank] * 2
    groups = await ratchet.gather_async(fails_once, SCENARIOS[:1], attempts=3, concurrency=1)
    assert groups[0].rewards == (None, None, None), "gathered without a judge"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    imported = ratchet.TrajectoryGroup([Scored(calls=[CALL], messages=talk), Scored(0.5, response="b", id="x")])
    with model:
        ruler = {"kind": "ruler", "base_url": f"{model.url}/v1", "model": "big"}
        ranked = await ratchet.score_async([*groups, imported], ruler)
    assert [sorted(map(str, group.rewards)) for group in ranked] == [["0.1", "0.2", "None"], ["0.1", "0.2"]]
    assert ranked[0].run == groups[0].run
    assert {one.explanation for one in ranked[1].trajectories} == {"e"}
    (failed,) = (one for one in ranked[0].trajectories if one.reward is None)
    assert str(failed.failure).startswith("ValueError: no such tool"), "a failed rollout is not judged"
    assert "no such tool" not in str(model.requests)

    judged = iter(range(9))

    def judge(trajectory: Mapping[str, Any], response: str) -> ratchet.Judgement:
        if next(judged) == 0:
            raise KeyError(response)
        return ratchet.Judgement(float(len(trajectory["messages"])), {"length": float(len(response))})

    (again,) = await ratchet.score_async(
        [dataclasses.replace(imported, trajectories=[imported.trajectories[0]] * 2)], judge
    )
    assert again.rewards == (None, 2.0)
    assert "KeyError" in str(again.trajectories[0].failure)
    assert again.trajectories[1].metrics == {"length": 1.0}
    with pytest.raises(ratchet.JudgeError, match="reads `trajectory`"):
        ratchet.score([imported], judge)
    with pytest.raises(ratchet.TuningError, match=r"no trajectory could be scored: .*ZeroDivisionError"):
        ratchet.score([imported], lambda response: 1 / 0 * len(response))
    with pytest.raises(ratchet.InvalidArgument, match="no judge is set: give judge="):
        ratchet.score([imported])
    with pytest.raises(ratchet.TuningError, match=r"groups\[0\] is \[\]: give a ratchet.TrajectoryGroup"):
        ratchet.score([[]], judge)  # type: ignore[list-item]
