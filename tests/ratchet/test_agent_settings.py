"""Several agents: their entries in `agents`, merged with the shared sections; errors; variables; the last run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.errors import SettingsError
from ratchet.settings.load_settings import load, with_last_run
from ratchet.settings.project_settings import Settings
from ratchet.supervisor.services import write_resolved_settings
from ratchet.trainer.settings.judge_specs import FunctionSpec

TWO = """
base_model: tiny
trainer: {judge: shared:judge, num_generations: 4}
learner: {lora_r: 4, lora_alpha: 8}
agents:
  mail:
    judge: mail:judge
    roles: [writer]
    share: 2
    learner: {lora_alpha: 32}
  Support-Bot:
"""


def read(tmp_path: Path, text: str, model: str | None = None, **environ: str) -> Settings:
    file = tmp_path / "ratchet.yaml"
    file.write_text(text)
    return load(file, {("model",): ("--model", model), ("state_dir",): ("", str(tmp_path / "state"))}, environ)


def test_an_agent_has_its_own_keys_and_the_shared_ones(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO)
    assert list(settings.agents_by_name) == ["mail", "Support-Bot"]
    mail, bot = (settings.for_agent(name).trainer for name in settings.agents)
    assert (mail.model, mail.judge, mail.roles, mail.share) == (
        "mail",
        FunctionSpec(function="mail:judge"),
        ("writer",),
        2,
    )
    assert (bot.model, bot.judge, bot.roles, bot.share) == ("Support-Bot", FunctionSpec(function="shared:judge"), (), 1)
    assert mail.num_generations == bot.num_generations == 4
    assert (mail.learner.lora_alpha, bot.learner.lora_alpha) == (32, 8)
    assert mail.learner_process == bot.learner_process
    assert mail.checkpoints != bot.checkpoints
    assert settings.has_judge


def test_a_section_of_an_agent_is_merged_with_the_shared_one(tmp_path: Path) -> None:
    text = "trainer: {resample: {samples: 3, concurrency: 7}}\nagents: {mail: {resample: {samples: 5}}}"
    mail = read(tmp_path, text).for_agent("mail").trainer
    assert (mail.resample.samples, mail.resample.concurrency) == (5, 7)


def test_without_agents_the_model_is_the_one_agent(tmp_path: Path) -> None:
    settings = read(tmp_path, "model: mail\ntrainer: {judge: a:b}")
    assert settings.agents_by_name == {"mail": settings.trainer}
    assert settings.for_agent("mail") is settings
    assert settings.proxy.agents == ("mail",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agents: {mail: {jugde: a:b}}", "unknown key agents.mail.jugde; the nearest known key is agents.mail.judge"),
        ("agents: {mail: {lora_alpa: 4}}", "the nearest known key is agents.mail.learner.lora_alpha"),
        ("agents: {mail: {metrics_port: 1}}", "agents.mail.metrics_port belongs to the trainer's process"),
        ("agents: {mail: {report_to: [wandb]}}", "set trainer.report_to"),
        ("agents: {mail: {store: a.db}}", "agents.mail.store is shared by all agents: set store at the top level"),
        ("agents: {mail: {vllm: {port: 1}}}", "agents.mail.vllm is shared by all agents"),
        (
            "agents: {mail: {learner: {lora_r: 4}}}",
            "agents.mail.learner.lora_r is shared by all agents of the learner: set learner.lora_r",
        ),
        ("agents: {mail: {learner: {lora_alpha: 0}}}", "ratchet.yaml: agents.mail.learner.lora_alpha is 0"),
        ("agents: {mail: {num_generations: 1}}", "ratchet.yaml: agents.mail.num_generations: a group of 1 has nothing"),
        ("agents: {mail: {share: 0}}", "ratchet.yaml: agents.mail.share: input should be greater than 0"),
        ("agents: {mail: {min_group_size: 9}}", "agents.mail: min_group_size 9 is more than num_generations 8"),
        ("agents: {mail: {judge: {kind: rules}}}", "agents.mail.judge: unknown kind 'rules'"),
        ("agents: {mail: x}", "agents.mail is a section; put its keys under it"),
        ("agents: [mail]", "agents is a section"),
        ("agents: {mail: {}, Mail: {}}", "agents 'mail' and 'Mail' differ by case only"),
        ("agents: {'a@b': {}}", "agent 'a@b' contains '@', which separates agent and version"),
        ("agents: {'..': {}}", "agent '..': its files are in a folder of its name"),
        ("model: mail\nagents: {mail: {}}", "ratchet.yaml: model and agents exclude each other"),
        ("trainer: {share: 2}", "unknown key trainer.share; the nearest known key is"),
        (
            "agents: {gpt: {}}\nmodel_list: [{model_name: gpt, litellm_params: {model: openai/x}}]",
            "gpt is the name of an",
        ),
        (
            "agents: {mail: {resample: {samples: 2}}}\nvllm: {extra_args: [--disable-log-stats]}",
            "agents.mail.resample.samples: resampling waits for an idle vLLM",
        ),
    ],
)
def test_a_wrong_entry_names_its_place_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        read(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_option_model_chooses_an_agent(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO, model="mail")
    assert (settings.model, settings.agents) == ("mail", {})
    assert settings.trainer.roles == ("writer",)
    for wrong, message in (("MAIL", "did you mean mail?"), ("x", "the agents are mail, Support-Bot")):
        with pytest.raises(SettingsError, match=f"there is no agent '{wrong}'; .*{message}".replace("?", r"\?")):
            read(tmp_path, TWO, model=wrong)


def test_limits_of_other_agents_do_not_concern_a_chosen_one(tmp_path: Path) -> None:
    text = TWO + "proxy: {agent_limits: {Support-Bot: {requests_per_minute: 3}}}"
    assert read(tmp_path, text).proxy.agent_limits.keys() == {"Support-Bot"}
    assert read(tmp_path, text, model="mail").proxy.agent_limits == {}
    big = "\nmodel_list: [{model_name: big, litellm_params: {model: hosted_vllm/b, api_base: 'http://b/v1'}}]\n"
    text = TWO + big + "proxy: {fallbacks: {outage: {Support-Bot: [big], mail: [big]}}}"
    assert read(tmp_path, text).proxy.fallbacks.outage.keys() == {"Support-Bot", "mail"}
    assert read(tmp_path, text, model="mail").proxy.fallbacks.outage == {"mail": ("big",)}


def test_variables_set_keys_of_agents_that_are_there(tmp_path: Path) -> None:
    settings = read(
        tmp_path, TWO, RATCHET_AGENTS__SUPPORT_BOT__JUDGE="of.a.variable:judge", RATCHET_AGENTS__MAIL__SHARE="3"
    )
    assert settings.agents["Support-Bot"].judge == FunctionSpec(function="of.a.variable:judge")
    assert settings.for_agent("mail").trainer.share == 3
    whole = {"RATCHET_AGENTS": "{mail: {judge: a:b}, support: }", "RATCHET_AGENTS__SUPPORT__SHARE": "2"}
    settings = read(tmp_path, "", **whole)
    assert settings.given["agents"] == {"mail": {"judge": "a:b"}, "support": {"share": 2}}


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        (TWO, {"RATCHET_AGENTS__MIAL__JUDGE": "a:b"}, "there is no agent 'mial', and a variable adds none"),
        ("", {"RATCHET_AGENTS__MAIL__JUDGE": "a:b"}, "no agents are set; set `agents` in the file or RATCHET_AGENTS"),
        ("agents: {a-b: , a_b: }", {"RATCHET_AGENTS__A_B__SHARE": "2"}, "a-b and a_b have this name"),
        (TWO, {"RATCHET_AGENTS__MAIL__JUGDE": "a:b"}, "the nearest variable is RATCHET_AGENTS__MAIL__JUDGE"),
        (TWO, {"RATCHET_AGENTS__MAIL": "a:b"}, "names a section; name a key, such as RATCHET_AGENTS__MAIL__"),
        (TWO, {"RATCHET_AGENTS": "mail"}, "must hold agents with their keys"),
        (TWO, {"RATCHET_MODEL": "mail"}, "variable RATCHET_MODEL: model and agents exclude each other"),
    ],
)
def test_a_variable_that_names_no_agent_is_refused(
    tmp_path: Path, text: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as error:
        read(tmp_path, text, **environ)
    assert message in str(error.value)


def test_the_agents_of_the_last_run_are_found_without_their_file(tmp_path: Path) -> None:
    running = read(tmp_path, TWO)
    running.state.make(min_free_disk_mb=0)
    write_resolved_settings(running, running.state.resolved)
    assert load(running.state.resolved, environ={}).agents == running.agents
    elsewhere = with_last_run(read(tmp_path, ""))
    assert elsewhere.given["agents"] == running.given["agents"]
    chosen = with_last_run(read(tmp_path, "", model="mail"), {"model"})
    assert (chosen.model, chosen.trainer.judge) == ("mail", FunctionSpec(function="mail:judge"))
    with pytest.raises(SettingsError, match="did you mean mail"):
        with_last_run(read(tmp_path, "", model="Mail"), {"model"})
    edited = with_last_run(read(tmp_path, "agents: {mail: {judge: new:judge}, later: }"))
    assert list(edited.agents) == ["mail", "Support-Bot"]
    assert edited.given["agents"]["mail"] == {"judge": "new:judge"}


def test_an_option_is_stronger_than_the_last_runs_entries_and_limits_of_other_agents_do_not_matter(
    tmp_path: Path,
) -> None:
    running = read(tmp_path, TWO)
    running.state.make(min_free_disk_mb=0)
    write_resolved_settings(running, running.state.resolved)
    (tmp_path / "ratchet.yaml").write_text(
        "proxy: {agent_limits: {later: {requests_per_minute: 9}}}\nagents: {later: }"
    )
    options = {("state_dir",): ("", str(tmp_path / "state")), ("trainer", "judge"): ("--judge", "mine:judge")}
    settings = with_last_run(load(tmp_path / "ratchet.yaml", options, {}))
    assert {agent.judge for agent in settings.agents.values()} == {FunctionSpec(function="mine:judge")}
    assert settings.proxy.agent_limits == {}


def test_a_last_run_of_one_agent_is_that_agents(tmp_path: Path) -> None:
    running = read(tmp_path, "model: mail\nbase_model: tiny")
    running.state.make(min_free_disk_mb=0)
    write_resolved_settings(running, running.state.resolved)
    found = with_last_run(read(tmp_path, TWO))
    assert (found.model, found.agents) == ("mail", {})
