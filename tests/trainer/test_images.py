"""Images, from three dialects to a round: recorded as they came, judged, shown to judge models, and never trained."""

from __future__ import annotations

import base64
import json
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from ratchet.status import status_lines
from ratchet.store.store import Store
from ratchet.trainer.judges.transcript_json import JudgeImages
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.harness.trainer import judge_samples
from tests.harness.trainer.stepped_controller import SteppedController
from tests.trainer.test_ruler import judge, member, shown


def png(shade: int) -> bytes:
    """A whole PNG of one grey pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    pixel = zlib.compress(bytes((0, shade)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")


def data_url(shade: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(shade)).decode()}"


@pytest.fixture
def proxy(store: Store, tmp_path: Path) -> Iterator[Proxy]:
    with served(ScriptedVllm(base="base")) as url, running(url, store, tmp_path) as made:
        yield made


def by_chat(proxy: Proxy, text: str, task: str) -> None:
    parts: Any = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": data_url(7)}}]
    headers = {"x-ratchet-task": task}
    proxy.agent().chat.completions.create(
        model="agent", messages=[{"role": "user", "content": parts}], extra_headers=headers
    )


def by_responses(proxy: Proxy, text: str, task: str) -> None:
    parts = [{"type": "input_image", "image_url": data_url(7)}, {"type": "input_text", "text": text}]
    messages: Any = [{"role": "user", "content": parts}]
    client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="k")
    with client:
        client.responses.create(model="agent", input=messages, extra_headers={"x-ratchet-task": task})


def by_messages(proxy: Proxy, text: str, task: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(7)).decode()}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    with anthropic.Anthropic(base_url=proxy.url, api_key="k") as client:
        client.messages.create(
            model="agent", max_tokens=50, messages=[{"role": "user", "content": content}],
            extra_headers={"x-ratchet-task": task},
        )  # fmt: skip


Asks = Callable[[Proxy, str, str], None]


@pytest.mark.slow
@pytest.mark.parametrize("asks", [by_chat, by_responses, by_messages])
def test_images_are_recorded_and_judged_and_their_round_says_why_nothing_was_trained(
    asks: Asks, proxy: Proxy, store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    judge_samples.by_answer |= {"cat": 0.0, "dog": 1.0}
    for answer in ("cat", "dog"):
        asks(proxy, f"What is it? #say={answer}", "picture/1")
    proxy.settled()
    runs = store.trajectories.page(10)
    for run in runs:
        transcript = store.trajectories.read(run.id)
        assert data_url(7) in json.dumps(transcript.messages)
        assert [call.untrainable for call in transcript.calls] == ["image"]
    controller = make_controller(groups_per_round=1)
    controller.step(time.time() + 1000.0)
    assert sorted(one.score or 0.0 for one in store.groups.verdicts([run.id for run in runs]).values()) == [0.0, 1.0]
    (alarm,) = store.alarms.active()
    assert "tokens image (images are " in alarm.reason
    assert store.policies.live()["agent"].version == 0
    assert store.groups.drop_counts("agent") == {"untrainable": 1}


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as made:
        yield made


def conversation_with(url: str, answer: str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def ranks_two(model: ScriptedModel, **changes: Any) -> dict[str, Any]:
    """What RULER asks about two members that saw different images."""
    scores = [{"trajectory_id": label, "explanation": "", "score": 0.5} for label in ("1", "2")]
    model.answers = [says({"scores": scores})]
    members = [member(name, conversation_with(data_url(shade), name)) for name, shade in (("a", 1), ("b", 2))]
    verdicts = judge(model, **changes).judge("g", members).verdicts
    assert [verdict.failure for verdict in verdicts] == [None, None]
    return model.requests[-1]


def test_a_judge_model_that_cannot_see_reads_what_the_images_are_and_none_of_their_bytes(
    model: ScriptedModel,
) -> None:
    request = ranks_two(model)
    text = json.dumps(shown(request))
    assert "base64" not in text
    first, second = (attempt["messages"][0]["content"][1] for attempt in shown(request)["attempts"])
    assert (first["type"], first["media_type"], first["bytes"]) == ("image", "image/png", len(png(1)))
    assert first["sha256"] != second["sha256"]


def test_a_judge_model_with_vision_receives_at_most_max_images(model: ScriptedModel) -> None:
    parts = ranks_two(model, max_images=1)["messages"][1]["content"]
    pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert len(pictures) == 1
    assert pictures[0] in (data_url(1), data_url(2))
    attempts = json.loads(parts[0]["text"])["attempts"]
    assert [attempt["messages"][0]["content"][1].get("shown_as") for attempt in attempts] == ["image 1", None]


def test_an_image_is_shown_once_and_an_address_is_left_as_it_is() -> None:
    pictures = JudgeImages(4)
    described = pictures.describe(
        [conversation_with(url, "x") for url in (data_url(1), data_url(1), "https://e.org/cat.png")]
    )
    named = [messages[0]["content"][1] for messages in described]
    assert [one.get("shown_as") for one in named] == ["image 1", "image 1", None]
    assert named[2]["image_url"]["url"] == "https://e.org/cat.png"
    assert len(pictures.content("?")) == 3


def test_an_image_too_large_to_be_shown_is_described() -> None:
    data = base64.b64encode(random.Random(0).randbytes(7_000_000)).decode()
    pictures = JudgeImages(4)
    described = pictures.describe(conversation_with(f"data:image/png;base64,{data}", "x"))
    assert described[0]["content"][1]["bytes"] == 7_000_000
    assert pictures.content("?") == "?"


def test_the_status_names_images_among_what_was_left_out() -> None:
    store: dict[str, Any] = {
        "trajectories": {}, "dropped": {}, "dropped_groups": {}, "untrained_tokens": {"image": 12}, "resamples": {},
        "rounds": {}, "live": None, "release": None, "unprotected": False, "ramp": None,
        "pending_approval": None, "decisions": [], "alarms": [], "interrupted_runs": [],
        "proxies": [], "next_round": None, "policy_change": None, "base_model": None, "rejected_rows": None,
        "unproven": None,
    }  # fmt: skip
    status = {
        "project": "p", "running": True, "ready": True, "base_url": None, "console": None, "services": {},
        "versions": {}, "other_projects_up": [], "other_projects": [], "orphaned_pid": None, "store": store,
    }  # fmt: skip
    assert "12 tokens image: " in "\n".join(status_lines(status))
