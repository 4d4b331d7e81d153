"""Vendors' SDKs on the real vLLM, each in its own environment: an agent's loop with tools is one trajectory, exact."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ratchet.demo.email_search.agent import ACCEPTED, TOOLS, call_tool, opening
from ratchet.demo.email_search.mailbox import Mailbox, synthetic_mails
from ratchet.demo.email_search.tasks import MailTask, make_tasks
from ratchet.store.records import Call
from ratchet.store.store import Store, open_store
from tests.harness.cli.project import Project, wait_for
from tests.harness.clients.table import CLIENTS, Client

MOST = 96
CHAT = {"max_tokens": MOST, "temperature": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "openai2": CHAT,
    "openai3": CHAT,
    "openai-npm": CHAT,
    "openai3-responses": {"max_output_tokens": MOST, "temperature": 0},
    "anthropic": {"max_tokens": MOST, "extra_body": {"temperature": 0}},
}
CHOSEN = [client for client in CLIENTS if client.name in OPTIONS]


ROUNDS = 3  # search, read, answer

MAILS = synthetic_mails(1)
TASKS = iter(make_tasks(MAILS, 1)["test"])


def client_request(task: MailTask, box: Mailbox, streamed: bool, options: dict[str, Any]) -> dict[str, Any]:
    """A question for a client program, and the mailbox content that answers it."""
    system, question = (message["content"] for message in opening(task.question))
    search, read = json.dumps({"keywords": [task.person, task.topic]}), json.dumps({"message_id": task.message_id})
    return {
        "question": question,
        "streamed": streamed,
        "replies": {
            "search_inbox": [call_tool(box, "search_inbox", search).content],
            "read_email": [call_tool(box, "read_email", read).content],
            "return_final_answer": [ACCEPTED],
        },
        "system": system,
        "tools": list(TOOLS),
        "options": options,
        "rounds": ROUNDS,
    }


def calls_of(store: Store, task: MailTask) -> list[list[Call]]:
    """The calls of one question by trajectory, oldest first."""
    transcripts = [store.trajectories.read(run.id) for run in store.trajectories.page(100)]
    return [list(found.calls) for found in transcripts if task.question in str(found.messages)]


@pytest.mark.e2e
@pytest.mark.parametrize("client", CHOSEN, ids=lambda client: client.name)
def test_a_loop_with_tools_is_one_exact_trajectory(
    project: Project, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_MODEL", "mail")
    url, box = str(project.running()["proxy_url"]), Mailbox.build(":memory:", [made.mail for made in MAILS])
    tasks = [next(TASKS) for _ in client.modes]
    questions = [
        client_request(task, box, mode, OPTIONS[client.name]) for task, mode in zip(tasks, client.modes, strict=True)
    ]
    client.program.run(url, questions)
    store = open_store(str(project.state / "store.db"))
    wait_for("its calls are in the store", lambda: httpx.get(f"{url}/health/backlog").json()["unshipped_records"] == 0)
    for task, streamed in zip(tasks, client.modes, strict=True):
        (calls,) = calls_of(store, task)
        assert {call.state for call in calls} == {"answered"}
        assert 2 <= len(calls) <= ROUNDS
        assert {(call.dialect, call.streamed) for call in calls} == {(client.dialect, streamed)}
        assert [call.context for call in calls] == ["root"] + ["exact"] * (len(calls) - 1)
        assert {call.untrainable for call in calls} == {None}
        sampled = [choice for call in calls for choice in call.choices]
        assert all(len(one.token_ids) == len(one.logprobs) > 0 for one in sampled)
        assert sum(bool(one.tool_call_ids) for one in sampled) >= 2
    store.close()
