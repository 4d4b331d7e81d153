"""Commands of a project with several agents: all in one table, one by --model, and clear errors for the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ratchet.errors import SettingsError
from ratchet.settings.load_settings import load
from ratchet.store.store import Store, open_store
from ratchet.supervisor import preflight_checks, services, vllm_command
from tests.harness.cli.project import Project

JUDGE = "tests.harness.tuner.judges:exact"


@pytest.fixture
def agents(project: Project) -> Project:
    """A project of two agents, of which one has a judge of its own."""
    project.write(agents={"mail": {"judge": JUDGE, "groups_per_round": 5}, "Support-Bot": {}})
    project.state.mkdir(parents=True)
    return project


@pytest.fixture
def store(agents: Project) -> Iterator[Store]:
    """Their store, with version 0 of both."""
    opened = open_store(f"sqlite:///{agents.state / 'store.db'}")
    for name in ("mail", "Support-Bot"):
        opened.policies.register_base(name, "base@0")
    yield opened
    opened.close()


@pytest.mark.usefixtures("store")
def test_status_shows_all_agents_in_one_table_and_one_of_them_in_full(agents: Project) -> None:
    shown = agents.call("status").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["mail", "@0", "none", "0", "of", "5", "groups", "-", "-"] in rows
    assert ["Support-Bot", "@0", "none", "no", "judge", "-", "-"] in rows
    one = agents.call("status", "--model", "mail").stdout
    assert "live policy   mail@0" in one
    assert "Support-Bot" not in one
    data = json.loads(agents.call("status", "--json").stdout)["store"]
    assert data["agents"]["mail"]["live"] == {"model": "mail", "version": 0}
    assert "live" not in data


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("status", "--report"),
            "--model NAME (in Python agent=NAME): mail, Support-Bot",
        ),
        (("status", "--model", "Mail"), "there is no agent 'Mail'; did you mean mail?"),
        (("status", "--model", "suport-bot"), "did you mean Support-Bot?"),
        (("feedback", "export", "--format", "unpaired", "--out", "x"), "choose one with --model NAME"),
        (("judge", "try", "traj_1"), "choose one with --model NAME"),
        (("policies", "list", "--model", "MAIL"), "MAIL: no such agent in this store; did you mean mail?"),
        (("policies", "promote", "support-bot@1", "--reason", "x"), "did you mean Support-Bot?"),
        (("policies", "rollback", "x", "--reason", "x"), "x: no such agent in this store; known are Support-Bot, mail"),
        (("trajectories", "list", "--model", "MAIL"), "no trajectory is of MAIL; did you mean mail?"),
        (("store", "export", "--model", "support-bot"), "no trajectory is of support-bot; did you mean Support-Bot?"),
        (("tune", "weights", "--model", "maill", "--tasks", "x"), "there is no agent 'maill'; did you mean mail?"),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_command_without_its_agent_says_which_there_are(
    agents: Project, command: tuple[str, ...], message: str
) -> None:
    refused = agents.call(*command)
    assert refused.returncode
    assert message in refused.stdout


def test_the_judge_of_an_option_is_stronger_than_an_agents(agents: Project) -> None:
    options = {("trainer", "judge"): ("--judge", "other:judge"), ("model",): ("--model", "mail")}
    assert load(agents.folder / "ratchet.yaml", options, {}).given["trainer"]["judge"] == "other:judge"


def test_vllm_serves_the_base_under_a_name_that_no_agent_changes(agents: Project) -> None:
    settings = load(agents.folder / "ratchet.yaml", environ={})
    assert "--served-model-name base@0" in str(vllm_command.build_command(settings, 8001, gpu=False))
    alone = settings.for_agent("mail")
    assert "--served-model-name mail@0" in str(vllm_command.build_command(alone, 8001, gpu=False))


def test_each_judge_is_checked_and_named(agents: Project) -> None:
    agents.write(agents={"mail": {"judge": JUDGE}, "twin": {"judge": JUDGE}, "bad": {"judge": "nowhere:judge"}})
    settings = load(agents.folder / "ratchet.yaml", environ={})
    with pytest.raises(SettingsError, match=r"agents\.bad\.judge: .*nowhere"):
        preflight_checks.check_judges(settings, agents._environ({}))


def test_an_agent_without_a_judge_is_noted(agents: Project) -> None:
    settings = load(agents.folder / "ratchet.yaml", environ={})
    plan = services.plan_services(settings, config=agents.folder / "resolved.yaml")
    assert [note for note in plan.notes if note.startswith("no judge is set for Support-Bot")]
    assert [service.name for service in plan.services] == ["vllm", "proxy", "learner", "trainer"]


def test_the_base_model_is_recorded_for_every_agent_and_read_once(agents: Project, store: Store) -> None:
    settings = load(agents.folder / "ratchet.yaml", {("state_dir",): ("", str(agents.folder / ".ratchet"))}, {})
    assert preflight_checks.check_base_model(settings, store, print)
    mail, bot = (store.base_models.base_model_of(name) for name in settings.agents)
    assert mail is not None
    assert bot is not None
    assert mail.file_digests == bot.file_digests
    caches = [settings.state.base_digests(name).read_text() for name in settings.agents]
    assert caches[0] == caches[1]
