"""The learner service over real HTTP with a scripted host: verbs, lost answers, restarts, refusals, turns."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from ratchet.store.operation_records import JobProgress
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import (
    CheckpointDamaged,
    LearnerServiceError,
    LearnerUnreachable,
    NoLearningSignal,
    SettingError,
)
from ratchet.trainer.learner_api import Answer, OpenRequest, OperationRequest, RoundReport, TrainRequest, Verb, encode
from ratchet.trainer.learner_client import AgentLearner, LearnerConnection
from ratchet.trainer.learner_service.operations import CheckpointReferences, OpenAgent
from ratchet.trainer.learner_service.process import ServiceAddress
from ratchet.trainer.learner_service.service import (
    LEFT_SECONDS,
    MAX_LAG_SECONDS,
    MAX_SHORT_IN_A_ROW,
    LearnerMetrics,
    Operation,
    Turns,
)
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests import house
from tests.harness.json_server import JsonServer
from tests.harness.ports import free_port
from tests.harness.proxy.servers import eventually, served
from tests.harness.trainer.scripted_learner import (
    TOKEN,
    VOCABULARY,
    ScriptedHost,
    logprobs,
    scripted_server,
    scripted_service,
)

SETTINGS = LearnerSettings()


def row(name: str, advantage: float = 1.0) -> TokenRow:
    return TokenRow(name, (1, 2, 3), (0, 1, 1), (0.0, -0.5, -0.25), advantage)


def request(agent: str, verb: Verb, arguments: Any = None, state: str = "", share: float = 1.0) -> OperationRequest:
    return OperationRequest(agent, verb, msgspec.Raw(encode(arguments)), state, share)


def ask(connection: LearnerConnection, agent: AgentLearner, verb: str, arguments: Any) -> Answer:
    """The answer to a request that no client would make."""
    return connection.run(request("mail", cast("Verb", verb), arguments, agent._opened()))


def learner_of(connection: LearnerConnection, agent: str = "mail", source: Path | None = None) -> AgentLearner:
    return AgentLearner(connection, agent, SETTINGS, source, base_model={"weights": "abc"})


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


Connect = Callable[..., LearnerConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return connections that are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda url, token=None: stack.enter_context(contextlib.closing(LearnerConnection(url, token)))


@pytest.fixture
def connection(host: ScriptedHost) -> Iterator[LearnerConnection]:
    with scripted_service(host) as found:
        yield found


def test_the_verbs_do_what_the_host_does(host: ScriptedHost, connection: LearnerConnection, tmp_path: Path) -> None:
    learner, other = learner_of(connection), learner_of(connection, "support")
    assert learner.step == 0
    report = learner.train_round([row("a"), row("b")], 0.5)
    assert (report.rows, report.step, report.weight_change, learner.step) == (2, 2, 0.5, 2)
    trained = ["a", "b"]
    assert learner.score([row("x"), (4, 5)]) == [logprobs(trained, row("x").ids), logprobs(trained, (4, 5))]
    assert other.score([(4,)]) == [logprobs([], (4,))]
    assert learner.score([(4,)], adapter=False) == [logprobs([], (4,))]
    learner.save(tmp_path / "0001")
    learner.train_round([row("c")])
    learner.load(tmp_path / "0001", SETTINGS)
    assert learner.step == 2
    assert host.weights == {"mail": ["a", "b"], "support": []}
    learner.load(None, SETTINGS)
    assert host.weights["mail"] == []
    learner.close()
    assert list(host.weights) == ["support"]


def test_errors_keep_their_class_and_message_and_unknown_ones_become_one(
    host: ScriptedHost, connection: LearnerConnection, tmp_path: Path
) -> None:
    learner = learner_of(connection)
    with pytest.raises(NoLearningSignal, match="all advantages are 0"):
        learner.train_round([row("a", advantage=0.0)])
    learner.train_round([row("b")])  # the state was not touched, and the client knows it
    learner.save(tmp_path / "0001")
    with pytest.raises(CheckpointDamaged):
        learner.load(tmp_path / "absent", SETTINGS)
    host.error = type("NewError", (NoLearningSignal,), {})("of a later version")
    learner.load(None, SETTINGS)
    with pytest.raises(LearnerServiceError, match="NewError: of a later version"):
        learner.train_round([row("c")])


def test_a_round_whose_answer_was_lost_is_never_saved(
    host: ScriptedHost, connection: LearnerConnection, tmp_path: Path
) -> None:
    learner = learner_of(connection)
    learner.train_round([row("a")])
    learner.save(tmp_path / "0001")
    host.in_round.clear()
    send(connection, "lost", request("mail", "train", TrainRequest((row("lost"),), 1.0), learner._opened()))
    assert host.in_round.wait(60)
    with pytest.raises(LearnerUnreachable, match="the answer of an operation was lost"):
        learner.save(tmp_path / "0002")
    assert not (tmp_path / "0002").exists()
    assert learner.score([(1,)]) == [logprobs(["a"], (1,))]  # opened again from 0001
    assert host.weights["mail"] == ["a"]


def send(connection: LearnerConnection, name: str, wanted: OperationRequest) -> None:
    """Send an operation without asking what becomes of it."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    sent = httpx.post(f"{connection.url}/v1/operations/{name}", content=encode(wanted), headers=headers)
    assert sent.status_code == 202


def test_an_operation_that_is_sent_twice_runs_once(host: ScriptedHost, connection: LearnerConnection) -> None:
    learner = learner_of(connection)
    wanted = request("mail", "train", TrainRequest((row("a"),), 1.0), learner._opened())
    for _ in range(2):
        send(connection, "one", wanted)
    learner.score([(1,)], adapter=False)
    assert host.weights == {"mail": ["a"]}


def test_an_operation_whose_client_left_before_its_turn_does_not_run(host: ScriptedHost) -> None:
    with scripted_service(host, clock=host.clock) as connection:
        slow, gone = learner_of(connection), learner_of(connection, "support")
        gone.score([(1,)])
        host.gate.clear()
        thread = threading.Thread(target=slow.train_round, args=([row("a")],))
        thread.start()
        assert host.in_round.wait(60)
        wanted = request("support", "train", TrainRequest((row("never"),), 1.0), gone._opened())
        send(connection, "gone", wanted)
        eventually(lambda: connection.status().agents[1].waiting == 1)
        host.now += LEFT_SECONDS + 1
        host.gate.set()
        thread.join(60)
        assert gone.score([(1,)]) == [logprobs([], (1,))]
        assert host.weights == {"mail": ["a"], "support": []}


def test_after_a_restart_a_saved_state_is_opened_again_and_an_unsaved_one_waits_for_load(
    connect: Connect, tmp_path: Path
) -> None:
    port = free_port()
    first, second, third = ScriptedHost(), ScriptedHost(), ScriptedHost()
    with scripted_service(first, port=port) as connection:
        learner = learner_of(connection)
        learner.train_round([row("a")])
        learner.save(tmp_path / "0001")
        url = connection.url
    learner._connection = connect(url, TOKEN)
    with pytest.raises(LearnerUnreachable, match=r"learner\.url .* does not answer"):
        learner.train_round([row("b")])
    with scripted_service(second, port=port):
        with pytest.raises(LearnerUnreachable, match="newest commit must be loaded"):
            learner.score([(1,)])  # a round was begun: what became of it is unknown
        learner.load(tmp_path / "0001", SETTINGS)
        assert second.weights["mail"] == ["a"]
    with scripted_service(third, port=port):
        with pytest.raises(LearnerUnreachable, match="does not have the state of mail"):
            learner.score([(1,)])
        assert learner.score([(1,)]) == [logprobs(["a"], (1,))]
        assert learner.step == 1


def test_a_second_controller_takes_the_agent_over(host: ScriptedHost, connection: LearnerConnection) -> None:
    first, second = learner_of(connection), learner_of(connection)
    first.train_round([row("a")])
    second.train_round([row("b")])
    with pytest.raises(LearnerUnreachable, match="another controller"):
        first.train_round([row("c")])
    assert host.weights["mail"] == ["b"]


def test_rounds_report_their_progress_and_that_they_wait(
    host: ScriptedHost, connection: LearnerConnection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    seen: list[JobProgress] = []
    learner, other = learner_of(connection), learner_of(connection, "support")
    learner.report_progress_to(Progress(seen.append))
    other.score([(1,)])
    host.gate.clear()
    threads = [threading.Thread(target=one.train_round, args=([row("a"), row("b")],)) for one in (learner, other)]
    threads[0].start()
    assert host.in_round.wait(60)
    threads[1].start()
    eventually(lambda: any(progress.done == 2 for progress in seen))
    eventually(lambda: "event=learner_waiting agent=support ahead=1" in caplog.text)
    assert connection.status().running == "mail train"
    host.gate.set()
    for thread in threads:
        thread.join(60)
    assert seen[-1].ended
    assert {progress.total for progress in seen} == {2}


class QueuedRounds(ScriptedHost):
    """A host whose rounds all name the state that their agent had at first, so that many can wait."""

    agents: dict[str, OpenAgent]

    def train_round(self, agent: str, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        self.agents[agent].state = ""
        return super().train_round(agent, rows, rate_scale)


def test_agents_take_turns_by_compute_time_although_one_has_long_rounds() -> None:
    host = QueuedRounds()
    host.round_seconds = {"slow": 60.0, "quick": 1.0}
    service, _ = scripted_server(host, clock=host.clock)
    host.agents = service.agents
    service.start()
    eventually(lambda: service.ready)
    host.gate.clear()
    done: list[Operation] = []
    for agent, count in (("slow", 4), ("quick", 130)):
        service.agents[agent] = OpenAgent(agent, 1.0)
        host.weights[agent] = []
        for number in range(count):
            scored = request(agent, "train", TrainRequest((row(f"{agent}{number}"),), 1.0), "")
            done.append(Operation(scored, asked_at=1000.0))
            service.submit(done[-1])
    host.gate.set()
    eventually(lambda: all(operation.answer for operation in done))
    assert service.stop(20)
    order = [agent for agent, _ in host.ran]
    assert order == ["slow", *["quick"] * 60, "slow", *["quick"] * 60, "slow", *["quick"] * 10, "slow"]
    assert {one.agent: one.seconds for one in service.agents.values()} == {"slow": 240.0, "quick": 130.0}


def test_refusals_name_the_remedy(
    connect: Connect, host: ScriptedHost, connection: LearnerConnection, tmp_path: Path
) -> None:
    with pytest.raises(LearnerServiceError, match="RATCHET_LEARNER_TOKEN"):
        learner_of(connect(connection.url, "wrong")).score([(1,)])
    with pytest.raises(LearnerServiceError, match="RATCHET_LEARNER_TOKEN"):
        connect(connection.url).status()
    other = {"weights": "of another", "config": "x"}
    with pytest.raises(LearnerServiceError, match="another base model \\(base\\): weights differ"):
        AgentLearner(connection, "mail", SETTINGS, base_model=other).score([(1,)])
    with pytest.raises(LearnerServiceError, match=r"learner\.max_body_mb"):
        learner_of(connection).train_round([row(f"t{'x' * 60_000}{number}") for number in range(20)])
    learner = learner_of(connection)
    with pytest.raises(LearnerServiceError, match="'merge'"):
        ask(connection, learner, "merge", None)
    assert "not an absolute path" in ask(connection, learner, "save", {"target": "/tmp/../etc"}).message
    assert "does not understand the request" in ask(connection, learner, "train", {"rows": 3}).message
    assert not any(verb == "train" for _, verb in host.ran)


def test_settings_that_the_learners_machine_cannot_have_are_refused_as_settings(connection: LearnerConnection) -> None:
    wanted = msgspec.to_builtins(OpenRequest(SETTINGS, None, "1", {}))
    refused = connection.run(
        request("mail", "open", wanted | {"settings": wanted["settings"] | {"loss_type": "of_a_plug_in"}})
    )
    assert refused.error == SettingError.__name__
    assert "loss_type" in refused.message


def test_checkpoints_are_written_only_where_the_learner_may(host: ScriptedHost, tmp_path: Path) -> None:
    with scripted_service(host, tmp_path / "mine") as connection:
        learner = learner_of(connection)
        learner.save(tmp_path / "mine" / "0001")
        with pytest.raises(LearnerServiceError, match="outside of"):
            learner.save(tmp_path / "theirs" / "0001")


def test_a_local_checkpoint_with_a_wrong_checksum_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "0001"
    writer = CheckpointReferences(tmp_path)

    def write(inside: Path) -> None:
        (inside / "adapter.bin").write_bytes(b"abc")

    checkpoint.write_atomically(folder, write)
    assert writer.fetch(str(folder)) == folder
    (folder / "adapter.bin").write_bytes(b"abd")
    with pytest.raises(CheckpointDamaged, match=r"adapter\.bin has changed .* roll back to another version"):
        CheckpointReferences(tmp_path).fetch(str(folder))


def test_another_version_of_ratchet_is_refused(connection: LearnerConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.trainer.learner_client.__version__", "9.9")
    with pytest.raises(LearnerServiceError, match=r"the controller 9\.9: install the same version"):
        learner_of(connection).score([(1,)])


def test_a_url_that_is_no_learner_is_refused_and_one_that_does_not_answer_is_an_outage(connect: Connect) -> None:
    server = JsonServer(lambda request: (200, {"hello": "world"}))
    try:
        with pytest.raises(LearnerServiceError, match="is not this version's learner service"):
            connect(server.url).status()
        with pytest.raises(LearnerServiceError, match="is not a learner service"):
            learner_of(connect(server.url)).score([(1,)])
    finally:
        server.close()
    with pytest.raises(LearnerUnreachable, match=r"start `ratchet learner` there"):
        connect(f"http://127.0.0.1:{free_port()}").status()


def test_without_a_token_only_loopback_addresses_are_served() -> None:
    with pytest.raises(SettingError, match="RATCHET_LEARNER_TOKEN"):
        ServiceAddress("0.0.0.0", 0, None)
    ServiceAddress("0.0.0.0", 0, "secret").bind().close()
    ServiceAddress("::1", 0, None)
    with ServiceAddress("127.0.0.1", 0, None).bind() as taken, pytest.raises(SettingError, match=r"learner\.port"):
        ServiceAddress("127.0.0.1", taken.getsockname()[1], None).bind()


def test_health_and_metrics_are_open_and_say_that_the_model_is_loading(connect: Connect, host: ScriptedHost) -> None:
    loaded = threading.Event()
    service, app = scripted_server(host)
    service._make_host = lambda: (loaded.wait(60) and host) or host
    with served(app.asgi) as url:
        service.start()
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/health/").status_code == 404
        with pytest.raises(LearnerUnreachable, match="is loading its base model"):
            learner_of(connect(url, TOKEN)).score([(1,)])
        assert "ratchet_learner_ready 0.0" in httpx.get(f"{url}/metrics").text
        loaded.set()
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200)
        connection = connect(url, TOKEN)
        assert connection.status().limits == host.limits
        learner = learner_of(connection)
        learner.train_round([row("a")])
        assert learner.unfit(row("a")) is None
        assert f"outside the base model's {VOCABULARY} ids" in str(
            learner.unfit(TokenRow("t", (1, VOCABULARY), (0, 1), (0.0, -1.0), 1))
        )
        page = httpx.get(f"{url}/metrics").text
        assert 'ratchet_learner_operations_total{alias="mail",state="done",verb="train"} 1.0' in page
        assert service.stop(20)


def test_an_unexpected_error_ends_the_learner_and_the_client_sees_an_outage(
    connect: Connect, host: ScriptedHost
) -> None:
    service, app = scripted_server(host)
    ended = threading.Event()
    service.on_end = ended.set
    with served(app.asgi) as url:
        service.start()
        eventually(lambda: service.ready)
        learner = learner_of(connect(url, TOKEN))
        learner.score([(1,)])
        host.error = ZeroDivisionError("a defect")
        failed: list[Exception] = []

        def train() -> None:
            try:
                learner.train_round([row("a")])
            except LearnerUnreachable as error:
                failed.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        assert ended.wait(60)
    thread.join(60)
    assert "ended before it answered" in str(failed[0]) or "does not answer" in str(failed[0])
    assert isinstance(service.error, ZeroDivisionError)


def test_every_metric_of_the_learner_is_documented() -> None:
    _, _, page = (house.ROOT / "docs" / "metrics.md").read_text().partition("## The learner")
    families = LearnerMetrics().registry.collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert names == set(re.findall(r"^\| `(ratchet_\w+)`", page, re.MULTILINE))


def a_round(agent: str, share: float = 1.0) -> Operation:
    return Operation(request(agent, "train", share=share))


def taken(turns: Turns) -> Operation:
    """The next operation; something waits."""
    found = turns.next()
    assert found is not None
    return found


def run(turns: Turns, lengths: dict[str, float], shares: dict[str, float], seconds: float) -> dict[str, float]:
    """Run rounds of agents that always have one waiting; return their compute times."""
    used = dict.fromkeys(lengths, 0.0)
    for agent, share in shares.items():
        turns.add(a_round(agent, share))
    while sum(used.values()) < seconds:
        operation = taken(turns)
        agent = operation.agent
        turns.add(a_round(agent, shares[agent]))
        turns.charge(operation, lengths[agent])
        used[agent] += lengths[agent]
    return used


@pytest.mark.parametrize("seed", range(20))
def test_compute_time_follows_the_shares_within_one_round_of_each(seed: int) -> None:
    dice = random.Random(seed)
    lengths = {f"agent{number}": dice.choice([0.1, 1.0, 7.0, 300.0]) for number in range(dice.randint(2, 6))}
    shares = {agent: dice.choice([0.5, 1.0, 2.0, 5.0]) for agent in lengths}
    used = run(Turns(), lengths, shares, 5000.0)
    for one in lengths:
        for other in lengths:
            bound = lengths[one] / shares[one] + lengths[other] / shares[other]
            assert abs(used[one] / shares[one] - used[other] / shares[other]) <= bound + 1e-6


def test_an_idle_agent_saves_up_no_turns_beyond_a_bound() -> None:
    turns = Turns()
    run(turns, {"busy": 10.0}, {"busy": 1.0}, 100 * MAX_LAG_SECONDS)
    for _ in range(1000):
        turns.add(a_round("late"))
    used: Counter[str] = Counter()
    while used.total() < 200:
        operation = taken(turns)
        used[operation.agent] += 1
        turns.charge(operation, 10.0)
        if operation.agent == "busy":
            turns.add(a_round("busy"))
    assert abs(used["late"] - used["busy"] - MAX_LAG_SECONDS / 10.0) <= 2


def test_an_agent_that_is_idle_for_a_moment_keeps_its_turn() -> None:
    turns = Turns()
    for agent in ("slow", "quick"):
        turns.add(a_round(agent))
    for length in (60.0, 1.0):
        turns.charge(taken(turns), length)
    turns.add(a_round("slow"))
    slow = taken(turns)  # the quick one has none ready
    turns.add(a_round("quick"))
    turns.add(a_round("slow"))
    turns.charge(slow, 60.0)
    assert (slow.agent, taken(turns).agent) == ("slow", "quick")


def test_short_operations_go_first_but_a_round_is_not_starved_by_them() -> None:
    turns, order = Turns(), []
    turns.add(a_round("patient"))
    for _ in range(3 * MAX_SHORT_IN_A_ROW):
        turns.add(Operation(request("chatty", "score")))
        operation = taken(turns)
        order.append(operation.verb)
        turns.charge(operation, 0.0)
    assert order.index("train") == MAX_SHORT_IN_A_ROW
    assert order.count("train") == 1


def test_a_save_after_a_long_round_does_not_wait_for_the_rounds_of_others() -> None:
    turns = Turns()
    turns.add(a_round("slow"))
    turns.charge(taken(turns), 600.0)
    turns.add(a_round("other"))
    turns.add(Operation(request("slow", "save")))
    assert taken(turns).verb == "save"


def test_closing_and_opening_again_is_not_worth_a_turn() -> None:
    turns = Turns()
    turns.add(a_round("greedy"))
    turns.charge(taken(turns), 100.0)
    turns.add(Operation(request("greedy", "close")))
    turns.charge(taken(turns), 0.0)
    turns.add(a_round("other"))
    turns.add(a_round("greedy"))
    assert taken(turns).agent == "other"
