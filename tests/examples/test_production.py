"""The production example: the feedback of its users, and that the server receives all of it."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.production import harmful
from examples.production.__main__ import main
from examples.production.figures import figures, gain, wilson
from examples.production.stream import Counter, Served, send_thumb, serve
from examples.production.users import DOWN, UP, USUAL, Habits, Thumb, thumbs, visits
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import TEST_PAIRS
from ratchet.store.states import TrajectoryState
from ratchet.store.store import open_store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.judges.kinds.given_scores import FeedbackJudge
from ratchet.trainer.settings.judge_specs import FeedbackSpec
from tests.harness.cli.project import Project
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripts import Messages, Script, calls
from tests.harness.records import commit_round

Play = Callable[[Callable[[Messages], Script]], Proxy]
FOLDER = Path(__file__).parents[2] / "examples" / "production"
TALKATIVE = Habits(silent=0.0, mistaken=0.0, revised=0.0, contradicted=0.0, delay=0.01)


def always_oslo(_: Messages) -> Script:
    return calls("return_final_answer", answer="Oslo")


async def stream(
    proxy: Proxy, home: Path, users: int, habits: Habits, model: str = "agent"
) -> tuple[list[Served], Counter]:
    box = Mailbox(home / DATABASE)
    try:
        return await serve(
            itertools.islice(visits(3), users),
            base_url=f"{proxy.url}/v1",
            api_key="x",
            model=model,
            box=box,
            concurrency=4,
            habits=habits,
        )
    finally:
        box.close()


async def test_every_thumb_is_stored_and_scores_its_trajectory(play: Play, home: Path) -> None:
    proxy = play(always_oslo)
    served, counter = await stream(proxy, home, 24, TALKATIVE)
    assert sum(counter.statuses.values()) == len(served) == 24
    assert set(counter.statuses) <= {201, 202}
    proxy.settled()
    proxy.store.trajectories.seal_idle_trajectories("agent", time.time() + 10.0, 1.0)
    runs = proxy.store.trajectories.page(state=TrajectoryState.SEALED)
    assert len(runs) == 24
    assert len({run.group_key for run in runs}) == 24, "hardly a question comes twice"
    assert len({run.family for run in runs}) == 1
    judge = FeedbackJudge(FeedbackSpec(kind="feedback"))
    content = {one.visit.task.question: one.rollout.success for one in served}
    for run in runs:
        transcript = proxy.store.trajectories.read(run.id)
        (verdict,) = judge.judge(None, [transcript]).verdicts
        assert verdict.score == float(content[transcript.messages[1]["content"]])
    assert 0 < sum(content.values()) < 24


@pytest.mark.slow
async def test_a_revised_thumb_counts_as_revised_and_a_colleague_has_a_vote(play: Play, home: Path) -> None:
    proxy = play(always_oslo)
    served, _ = await stream(proxy, home, 4, Habits(0.0, 0.0, revised=1.0, contradicted=1.0, delay=0.2))
    proxy.settled()
    judge = FeedbackJudge(FeedbackSpec(kind="feedback"))
    assert all(one.thumbs[0].value != one.thumbs[1].value for one in served)
    for run in proxy.store.trajectories.page():
        (verdict,) = judge.judge(None, [proxy.store.trajectories.read(run.id)]).verdicts
        assert (verdict.score, verdict.components["sources"]) == (0.5, 2.0)


async def test_silent_users_say_nothing(play: Play, home: Path) -> None:
    proxy = play(always_oslo)
    _, counter = await stream(proxy, home, 4, Habits(silent=1.0))
    assert counter.statuses == {}
    assert proxy.store.feedback.page() == []


def test_users_are_as_their_habits_say_and_the_same_for_the_same_seed() -> None:
    people = list(itertools.islice(visits(1), 3000))
    assert people[:50] == list(itertools.islice(visits(1), 50))
    assert not {(one.task.person, one.task.topic) for one in people} & set(TEST_PAIRS)
    rng = random.Random(0)
    feedback = [thumbs(one, True, USUAL, rng) for one in people]
    with_feedback = [one for one in feedback if one]
    assert len(with_feedback) / len(feedback) == pytest.approx(0.65, abs=0.03)
    assert sum(len({t.end_user for t in one}) > 1 for one in with_feedback) / len(with_feedback) == pytest.approx(
        0.08, abs=0.02
    )
    last = [[t for t in one if t.end_user.startswith("user")][-1].value for one in with_feedback]
    assert last.count(DOWN) / len(last) == pytest.approx(0.08, abs=0.02)
    assert all(later.after >= first.after for one in with_feedback for first, later in itertools.pairwise(one))


def test_a_revision_says_the_opposite_of_the_haste() -> None:
    one = next(visits(1))
    first, then = thumbs(one, False, Habits(0.0, 0.0, revised=1.0, contradicted=0.0), random.Random(1))
    assert (first.value, then.value, first.end_user) == (UP, DOWN, then.end_user)


async def test_a_thumb_that_the_server_cannot_take_is_given_again() -> None:
    answers = iter([503, 201])
    requests: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content))
        return httpx.Response(next(answers))

    counter = Counter()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://proxy") as web:
        await send_thumb(web, "key", "chatcmpl-1", Thumb(0.0, "ann", UP), counter)
    assert counter.statuses == {201: 1}
    assert requests == [{"response_id": "chatcmpl-1", "value": "up", "end_user": "ann"}] * 2


def test_intervals_are_wilsons_and_newcombes() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998a, table I
    assert gain((48, 80), (56, 70)) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)  # Newcombe 1998b, table II (a)
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.slow
def test_the_command_serves_the_users_and_tells_what_they_found(
    play: Play, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = play(always_oslo)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{proxy.url}/v1")
    arguments = ["--model", "agent", "--users", "32", "--delay", "0.01", "--home", str(home)]
    assert main([*arguments, "--json", str(tmp_path / "figures.json")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "figures.json").read_text("utf-8"))
    assert (result["users"], result["errors"], len(result["parts"])) == (32, 0, 8)
    assert sum(result["thumb_statuses"].values()) == result["feedback"]["thumbs"]


def test_without_a_server_the_command_names_what_is_missing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert main(["--model", "agent", "--home", str(home)]) == 1
    assert "OPENAI_BASE_URL" in capsys.readouterr().err


def write_adapter(folder: Path) -> None:
    """An adapter of two matrices, as PEFT saves it."""
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    matrices = {f"layer.lora_{one}.weight": np.ones((4, 4), np.float32) for one in "AB"}
    save_file(matrices, folder / "adapter_model.safetensors")


@pytest.mark.slow
def test_a_harmful_version_takes_the_place_of_what_is_not_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = {"lora_r": 4, "lora_alpha": 16}
    project = Project(tmp_path, model="agent", learner=learner, trainer={"judge": "m:judge"})
    config = tmp_path / "ratchet.yaml"
    monkeypatch.setenv("RATCHET_STATE_DIR", str(project.state.parent))
    project.state.mkdir(parents=True)
    store = open_store(str(project.state / "store.db"))
    store.policies.register_base("agent", "base")
    with pytest.raises(harmful.NotReady, match="no trained version of agent is live yet"):
        harmful.hand_in("agent", harmful.OPPOSITE, config)
    for number in (1, 2):
        folder = project.state / "models" / "agent" / "checkpoints" / f"{number:04d}"
        checkpoint.write_atomically(folder, write_adapter)
        commit_round(store, "agent", number, checkpoint=str(folder))
    store.policies.promote("agent", 1, {})
    assert harmful.hand_in("agent", harmful.OPPOSITE, config) == 3
    assert [one.state for one in store.policies.all("agent")] == ["retired", "live", "rejected", "candidate"]
    made = load_file(Path(store.policies.get("agent", 3).adapter or "") / "adapter_model.safetensors")
    assert np.array_equal(made["layer.lora_A.weight"], np.ones((4, 4)))
    assert np.array_equal(made["layer.lora_B.weight"], -np.ones((4, 4)))
    store.policies.reject("agent", 3, {}, by="invariants", reason="random text")
    known = {"state": "rejected", "decided_by": "invariants", "reason": "random text"}
    assert harmful.outcome("agent", 3, [], config) == {"version": 3, "users": 0, "content": None} | known
    store.close()


def test_noise_changes_the_matrices_b_alone(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_adapter(tmp_path / "source")
    copies = [harmful.altered_copy(tmp_path / "source", tmp_path / name, noise=0.5) for name in ("one", "two")]
    one, two = (load_file(copy / "adapter_model.safetensors") for copy in copies)
    assert np.array_equal(one["layer.lora_A.weight"], np.ones((4, 4)))
    assert 0.2 < np.std(one["layer.lora_B.weight"]) < 0.8
    assert np.array_equal(one["layer.lora_B.weight"], two["layer.lora_B.weight"])


async def test_a_stream_without_a_success_reports_its_errors(play: Play, home: Path) -> None:
    proxy = play(always_oslo)
    served, counter = await stream(proxy, home, 2, TALKATIVE, model="nobody-serves-this")
    result = figures(served)
    assert (result["errors"], counter.statuses) == (2, {})
