"""The prompt that a search begins from is what the agent itself sends, or what the user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratchet.store.records import Transcript
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.tuner.prompts.trials import captured, given, serving, system_prompt
from tests.harness.records import call_start, ended

Seen = Callable[..., Transcript]


@pytest.fixture
def seen(store: Store) -> Seen:
    """A rollout whose agent sent this system prompt, or none."""

    def make(name: str, prompt: str | None, role: str = "system") -> Transcript:
        system = [] if prompt is None else [{"role": role, "content": prompt}]
        messages = [*system, {"role": "user", "content": f"Do {name}."}]
        begin = call_start(f"call_{name}", name, messages)
        end = ended(begin, {"role": "assistant", "content": "done"}, messages=messages)
        store.calls.ship([begin, end])
        return store.trajectories.read(name)

    return make


def test_the_agents_own_system_prompt_is_read_from_what_it_sends(seen: Seen) -> None:
    seed = captured([seen("a", "Answer."), seen("b", "Answer.", role="developer")])
    assert (seed.text, seed.mode, seed.is_agents_own) == ("Answer.", "replace", True)


def test_an_agent_without_a_system_prompt_is_given_one(seen: Seen) -> None:
    seed = captured([seen("a", None), seen("b", None)])
    assert (seed.text, seed.mode, seed.is_agents_own) == ("", "replace", True)
    assert "it gets one" in seed.note


def test_a_system_prompt_that_differs_from_task_to_task_is_appended_to(seen: Seen) -> None:
    seed = captured([seen("a", "You help Ann."), seen("b", "You help Bob.")])
    assert (seed.text, seed.mode) == ("", "append")
    with pytest.raises(TuningError, match=r"differs between tasks: .*--seed-prompt"):
        captured([seen("c", "You help Ann."), seen("d", "You help Bob.")], "replace")


def test_appending_can_be_requested(seen: Seen) -> None:
    assert captured([seen("a", "Answer.")], "append").mode == "append"


def test_the_error_for_an_agent_that_calls_no_model_names_the_remedy() -> None:
    with pytest.raises(TuningError, match="ratchet doctor --workflow"):
        captured([])


def test_a_given_prompt_is_swapped_in_from_the_start() -> None:
    assert given(" Be good.\n").text == "Be good."
    assert not given("Be good.").is_agents_own
    with pytest.raises(TuningError):
        given(" \n")


def test_only_what_stands_before_the_first_word_counts_and_parts_are_joined(seen: Seen) -> None:
    assert system_prompt(seen("a", "Answer.")) == "Answer."
    assert system_prompt(seen("b", None)) == ""


def promote(store: Store, **prompt: Any) -> None:
    policy = store.policies.register_prompt_version("agent", store.prompts.register(**prompt).id, {})
    store.policies.promote_manually("agent", policy.version, by="a test", reason="a test")


def test_a_prompt_that_serves_already_is_what_the_search_begins_from(store: Store) -> None:
    store.policies.register_base("agent", "base")
    assert serving(store, "agent") is None
    promote(store, text="Be good.", mode="append")
    seed = serving(store, "agent")
    assert seed is not None
    assert (seed.text, seed.mode, seed.is_agents_own) == ("Be good.", "append", True)
    assert "agent@1" in seed.note
    assert serving(store, "agent", "replace") is None


def test_lessons_by_task_family_are_no_one_text_to_begin_from(store: Store) -> None:
    store.policies.register_base("agent", "base")
    promote(store, text="", mode="append", families={"math": "Check the sum."})
    assert serving(store, "agent") is None
