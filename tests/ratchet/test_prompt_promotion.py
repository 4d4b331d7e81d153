"""What a prompt tuning found becomes a candidate version, and only where it may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.api.runs import create_candidate
from ratchet.errors import InvalidArgument
from ratchet.store.states import PolicyState
from ratchet.store.store import Store, open_store


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    opened = open_store(str(store_file))
    opened.policies.register_base("agent", "base")
    yield opened
    opened.close()


def ended(store: Store, verdict: str, prompt: str | None = "Be good.", state: str = "done") -> str:
    """A run of prompt tuning that ended so; returns its id."""
    found = None if prompt is None else store.prompts.register(prompt).id
    details = {"verdict": verdict, "why": "so it was measured", "prompt_id": found}
    run = store.tunings.begin("prompt", "agent", {})
    store.tunings.end(run.id, state, {"details": details, "gain": {"low": 0.1}}, error="a test")
    return run.id


def test_a_better_prompt_becomes_a_candidate_with_its_evidence(store: Store) -> None:
    run = ended(store, "better")
    assert create_candidate(store, run) == "agent@1"
    policy = store.policies.get("agent", 1)
    assert policy.state is PolicyState.CANDIDATE
    assert store.prompts.get(policy.prompt_id or "").text == "Be good."
    assert policy.evidence == {"tuning": run, "verdict": "better", "gain": {"low": 0.1}}


@pytest.mark.parametrize("verdict", ["worse", "no better", "inconclusive"])
def test_a_prompt_that_is_not_shown_to_be_better_is_promoted_by_force_alone(store: Store, verdict: str) -> None:
    run = ended(store, verdict)
    with pytest.raises(InvalidArgument, match=f"{verdict}, so it was measured; promote it anyway with --force"):
        create_candidate(store, run)
    assert [one.version for one in store.policies.all("agent")] == [0]
    assert create_candidate(store, run, force=True) == "agent@1"


@pytest.mark.parametrize(
    ("prompt", "state", "message"),
    [(None, "done", "found no better prompt"), ("Be good.", "failed", "no prompt to promote")],
)
def test_a_run_without_a_prompt_is_refused(store: Store, prompt: str | None, state: str, message: str) -> None:
    run = ended(store, "better", prompt, state)
    with pytest.raises(InvalidArgument, match=message):
        create_candidate(store, run, force=True)
