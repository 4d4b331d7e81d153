"""The learner service over real HTTP with a scripted host: verbs, lost answers, restarts, refusals, turns."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

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
from ratchet.trainer.learner_api import MSGPACK, Answer, OpenRequest, TrainRequest, encode
from ratchet.trainer.learner_client import LearnerAgent, LearnerConnection, RemoteLearner
from ratchet.trainer.learner_service.compute_thread import Operation
from ratchet.trainer.learner_service.fair_queue import MAX_LAG_SECONDS, MAX_SHORT_IN_A_ROW, FairQueue
from ratchet.trainer.learner_service.metrics import LearnerMetrics
from ratchet.trainer.learner_service.operations import (
    AgentOperations,
    AgentSession,
    AgentSessions,
    LocalReferences,
    OnRows,
    decode_request,
)
from ratchet.trainer.learner_service.process import ServiceAddress
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


def learner_of(connection: LearnerConnection, agent: str = "mail", source: Path | None = None) -> RemoteLearner:
    return RemoteLearner(connection, LearnerAgent(agent, 1.0, {"weights": "abc"}), SETTINGS, source)


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
    host.gate.clear()
    host.in_round.clear()
    with httpx.Client(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        session = learner._opened()
        request = http.build_request(
            "POST",
            f"{connection.url}/v1/sessions/{session}/train",
            content=encode(TrainRequest(1, (row("lost"),), 1.0)),
            headers={"content-type": MSGPACK},
        )
        answer = http.send(request, stream=True)
        assert host.in_round.wait(60)
        answer.close()
    host.gate.set()
    with pytest.raises(LearnerUnreachable, match="operation of mail was lost"):
        learner.save(tmp_path / "0002")
    assert not (tmp_path / "0002").exists()
    assert learner.score([(1,)]) == [logprobs(["a"], (1,))]  # opened again from 0001
    assert host.weights["mail"] == ["a"]


def test_an_operation_whose_client_left_before_its_turn_does_not_run(
    host: ScriptedHost, connection: LearnerConnection
) -> None:
    slow, gone = learner_of(connection), learner_of(connection, "support")
    gone.score([(1,)])
    host.gate.clear()
    thread = threading.Thread(target=slow.train_round, args=([row("a")],))
    thread.start()
    assert host.in_round.wait(60)
    with httpx.Client(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        url = f"{connection.url}/v1/sessions/{gone._opened()}/train"
        with http.stream("POST", url, content=encode(TrainRequest(0, (row("never"),), 1.0))) as response:
            chunks = response.iter_bytes()  # dropping the iterator would close the connection
            next(chunks)
            eventually(lambda: connection.status().agents[1].waiting == 1)
    eventually(lambda: connection.status().agents[1].waiting == 0)
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
        with pytest.raises(LearnerUnreachable, match="does not know this session"):
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


def test_agents_take_turns_by_compute_time_although_one_has_long_rounds(host: ScriptedHost) -> None:
    host.round_seconds = {"slow": 60.0, "quick": 1.0}
    server = scripted_server(host)
    server.thread._clock = host.clock
    server.thread.start()
    eventually(lambda: server.thread.ready)
    host.gate.clear()
    done: list[Operation] = []
    for agent, count in (("slow", 4), ("quick", 130)):
        session = AgentSession(agent, 1.0)
        server._sessions.add(session)
        host.weights[agent] = []
        for number in range(count):
            body = encode(TrainRequest(number, (row(f"{agent}{number}"),), 1.0))

            def run(operations: AgentOperations, on_rows: OnRows, name: str = session.id, body: bytes = body) -> Answer:
                return operations.run("train", name, body, on_rows)

            operation = Operation(agent, "train", run, lambda: None)
            done.append(operation)
            server.thread.submit(operation)
    host.gate.set()
    eventually(lambda: all(operation.answer for operation in done))
    assert server.thread.stop(20)
    order = [agent for agent, _ in host.ran]
    assert order == ["slow", *["quick"] * 60, "slow", *["quick"] * 60, "slow", *["quick"] * 10, "slow"]
    assert {one.agent: one.seconds for one in server._sessions.all()} == {"slow": 240.0, "quick": 130.0}


def test_refusals_name_the_remedy(
    connect: Connect, host: ScriptedHost, connection: LearnerConnection, tmp_path: Path
) -> None:
    with pytest.raises(LearnerServiceError, match="RATCHET_LEARNER_TOKEN"):
        learner_of(connect(connection.url, "wrong")).score([(1,)])
    with pytest.raises(LearnerServiceError, match="RATCHET_LEARNER_TOKEN"):
        connect(connection.url).status()
    other = LearnerAgent("mail", 1.0, {"weights": "of another", "config": "x"})
    with pytest.raises(LearnerServiceError, match="another base model \\(base\\): weights differ"):
        RemoteLearner(connection, other, SETTINGS).score([(1,)])
    with pytest.raises(LearnerServiceError, match=r"learner\.max_body_mb"):
        learner_of(connection).train_round([row(f"t{'x' * 60_000}{number}") for number in range(20)])
    with pytest.raises(LearnerServiceError, match="no verb 'merge'"):
        connection.post(f"/v1/sessions/{learner_of(connection)._opened()}/merge", None)
    with pytest.raises(LearnerServiceError, match="not an absolute path"):
        connection.post(
            f"/v1/sessions/{learner_of(connection)._opened()}/save", {"revision": 0, "target": "/tmp/../etc"}
        )
    with pytest.raises(LearnerServiceError, match="does not understand the request"):
        connection.post(f"/v1/sessions/{learner_of(connection)._opened()}/train", {"rows": 3})
    assert not any(verb == "train" for _, verb in host.ran)


def test_settings_that_the_learners_machine_cannot_have_are_refused_as_settings() -> None:
    request = msgspec.to_builtins(OpenRequest("mail", SETTINGS, None, 1.0, "1", {}))
    body = encode(request | {"settings": request["settings"] | {"loss_type": "of_a_plug_in"}})
    with pytest.raises(SettingError, match="loss_type"):
        decode_request(body, OpenRequest)


def test_checkpoints_are_written_only_where_the_learner_may(host: ScriptedHost, tmp_path: Path) -> None:
    with scripted_service(host, tmp_path / "mine") as connection:
        learner = learner_of(connection)
        learner.save(tmp_path / "mine" / "0001")
        with pytest.raises(LearnerServiceError, match="outside of"):
            learner.save(tmp_path / "theirs" / "0001")


def test_a_local_checkpoint_with_a_wrong_checksum_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "0001"
    writer = LocalReferences(tmp_path)

    def write(inside: Path) -> None:
        (inside / "adapter.bin").write_bytes(b"abc")

    checkpoint.write_atomically(folder, write)
    assert writer.fetch(str(folder)) == folder
    (folder / "adapter.bin").write_bytes(b"abd")
    with pytest.raises(CheckpointDamaged, match=r"adapter\.bin has changed .* roll back to another version"):
        LocalReferences(tmp_path).fetch(str(folder))


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
    server = scripted_server(host)
    server._make_host = lambda: (loaded.wait(60) and host) or host
    with served(server.app) as url:
        server.thread.start()
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
        assert server.thread.stop(20)


def test_an_unexpected_error_ends_the_learner_and_the_client_sees_an_outage(
    connect: Connect, host: ScriptedHost
) -> None:
    server = scripted_server(host)
    ended = threading.Event()
    server.on_end = ended.set
    with served(server.app) as url:
        server.thread.start()
        eventually(lambda: server.thread.ready)
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
    with pytest.raises(ZeroDivisionError):
        server.raise_error()


def test_every_metric_of_the_learner_is_documented() -> None:
    _, _, page = (house.ROOT / "docs" / "metrics.md").read_text().partition("## The learner")
    families = LearnerMetrics(AgentSessions()).registry.collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert names == set(re.findall(r"^\| `(ratchet_\w+)`", page, re.MULTILINE))


def run(queue: FairQueue[str], lengths: dict[str, float], seconds: float) -> dict[str, float]:
    """Run rounds of agents that always have one waiting; return their compute times."""
    used = dict.fromkeys(lengths, 0.0)
    for agent in lengths:
        queue.push(agent, "round", is_round=True)
    while sum(used.values()) < seconds:
        popped = queue.pop()
        assert popped is not None
        agent = popped[0]
        queue.push(agent, "round", is_round=True)
        queue.charge(agent, lengths[agent])
        used[agent] += lengths[agent]
    return used


@pytest.mark.parametrize("seed", range(20))
def test_compute_time_follows_the_shares_within_one_round_of_each(seed: int) -> None:
    dice = random.Random(seed)
    lengths = {f"agent{number}": dice.choice([0.1, 1.0, 7.0, 300.0]) for number in range(dice.randint(2, 6))}
    shares = {agent: dice.choice([0.5, 1.0, 2.0, 5.0]) for agent in lengths}
    queue = FairQueue[str]()
    for agent, share in shares.items():
        queue.set_share(agent, share)
    used = run(queue, lengths, 5000.0)
    for one in lengths:
        for other in lengths:
            bound = lengths[one] / shares[one] + lengths[other] / shares[other]
            assert abs(used[one] / shares[one] - used[other] / shares[other]) <= bound + 1e-6


def test_an_idle_agent_saves_up_no_turns_beyond_a_bound() -> None:
    queue = FairQueue[str]()
    run(queue, {"busy": 10.0}, 100 * MAX_LAG_SECONDS)
    for _ in range(1000):
        queue.push("late", "round", is_round=True)
    used: Counter[str] = Counter()
    while used.total() < 200:
        popped = queue.pop()
        assert popped is not None
        agent = popped[0]
        used[agent] += 1
        queue.charge(agent, 10.0)
        if agent == "busy":
            queue.push("busy", "round", is_round=True)
    assert abs(used["late"] - used["busy"] - MAX_LAG_SECONDS / 10.0) <= 2


def test_an_agent_that_is_idle_for_a_moment_keeps_its_turn() -> None:
    queue = FairQueue[str]()
    for agent in ("slow", "quick"):
        queue.push(agent, "round", is_round=True)
    for length in (60.0, 1.0):
        popped = queue.pop()
        assert popped is not None
        queue.charge(popped[0], length)
    queue.push("slow", "round", is_round=True)
    assert queue.pop() == ("slow", "round")  # the quick one has none ready
    queue.push("quick", "round", is_round=True)
    queue.push("slow", "round", is_round=True)
    queue.charge("slow", 60.0)
    assert queue.pop() == ("quick", "round")


def test_short_operations_go_first_but_a_round_is_not_starved_by_them() -> None:
    queue = FairQueue[str]()
    queue.push("patient", "round", is_round=True)
    order: list[str] = []
    for _ in range(3 * MAX_SHORT_IN_A_ROW):
        queue.push("chatty", "score", is_round=False)
        popped = queue.pop()
        assert popped is not None
        order.append(popped[1])
        queue.charge(popped[0], 0.0)
    assert order.index("round") == MAX_SHORT_IN_A_ROW
    assert order.count("round") == 1


def test_a_save_after_a_long_round_does_not_wait_for_the_rounds_of_others() -> None:
    queue = FairQueue[str]()
    queue.push("slow", "round", is_round=True)
    assert queue.pop() == ("slow", "round")
    queue.charge("slow", 600.0)
    queue.push("other", "round", is_round=True)
    queue.push("slow", "save", is_round=False)
    assert queue.pop() == ("slow", "save")


def test_closing_and_opening_again_is_not_worth_a_turn() -> None:
    queue = FairQueue[str]()
    queue.push("greedy", "round", is_round=True)
    queue.pop()
    queue.charge("greedy", 100.0)
    queue.forget("greedy")
    queue.push("other", "first", is_round=True)
    queue.push("greedy", "second", is_round=True)
    assert queue.pop() == ("other", "first")


def test_a_removed_operation_never_runs() -> None:
    queue = FairQueue[list[int]]()
    first, second = [1], [1]
    queue.push("agent", first, is_round=True)
    queue.push("agent", second, is_round=True)
    assert queue.remove("agent", first)
    assert not queue.remove("agent", first)
    popped = queue.pop()
    assert popped is not None
    assert popped[1] is second
    assert len(queue) == 0
