"""The command line: quick, light, and clear when something is wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ratchet.checks.doctor import missing_key_kinds
from ratchet.cli import cli, run
from ratchet.store.db.column_types import pack_hash
from ratchet.store.db.engine import HEAD
from ratchet.store.operation_records import ProxyInstance
from ratchet.store.states import KeyScope
from ratchet.store.store import open_store
from ratchet.supervisor import pidfile
from tests.harness.cli.project import ROOT, Project

HEAVY = ("torch", "transformers", "trl", "peft", "vllm", "matplotlib", "scipy", "datasets", "openai")


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its words."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        yield (*path, name), command


def test_help_answers_in_under_half_a_second() -> None:
    def spent() -> float:  # CPU time, as the machine may be busy: the claim is about the command
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    fastest = 10.0
    for _ in range(3):
        before = spent()
        subprocess.run([sys.executable, "-m", "ratchet", "--help"], cwd=ROOT, check=True, capture_output=True)
        fastest = min(fastest, spent() - before)
    assert fastest < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["ratchet.cli", "ratchet.proxy.server", "ratchet.store", "ratchet.settings", "ratchet.supervisor.supervisor"],
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(("words", "command"), list(commands()), ids=lambda value: str(value))
def test_every_command_has_a_help_with_an_example(words: tuple[str, ...], command: click.Command) -> None:
    help_text = command.help or ""
    assert "Example:" in help_text
    assert "ratchet " + words[0] in help_text or "ratchet " in help_text


def test_an_unknown_option_exits_with_2(project: Project) -> None:
    assert project.run("up", "--no-such-option").returncode == 2


def test_a_word_that_is_no_command_is_answered_with_the_nearest_ones(project: Project) -> None:
    assert "did you mean `ratchet store export`" in project.run("export").stdout
    assert "did you mean `ratchet trajectories list`" in project.run("trajectoris", "list").stdout
    done = project.run("zzzzzz")
    assert (done.returncode, "did you mean" in done.stdout) == (2, False)


@pytest.mark.slow
def test_status_without_a_run_names_the_projects_that_there_are(project: Project) -> None:
    assert "--project NAME" not in project.run("status").stdout
    (project.folder / ".ratchet" / "demo" / "run").mkdir(parents=True)
    assert "projects  demo: select one with --project NAME" in project.run("status").stdout
    pidfile.write(project.folder / ".ratchet/demo/run/up.pid", os.getpid())
    assert "running   demo: select one with --project NAME" in project.run("status").stdout


@pytest.mark.slow
def test_status_names_the_proxies_that_run_elsewhere_on_the_same_store(project: Project) -> None:
    url = str(project.folder / "store.db")
    with open_store(url) as store:
        last_at = time.time() + 600  # the commands may be slow
        store.proxy_instances.heartbeat(ProxyInstance("d", "http://proxy:8000", {"mail": 0}, {}, 0.0, last_at))
    output = project.run("status", "--store", url, "--model", "mail").stdout
    assert "proxies   of this store, started elsewhere: http://proxy:8000" in output


@pytest.mark.slow
def test_status_says_how_far_the_last_round_moved_the_policy(project: Project) -> None:
    url = str(project.folder / "store.db")
    figures = {"approx_kl": 2.4e-8, "approx_kl_tokens": 9, "logprob_change_positive_mean": 0.0}
    how = {"learning_rate": 1e-5, "dtype": "fp32"}
    with open_store(url) as store:
        store.policies.register_base("mail", "mail")
        store.rounds.commit(
            store.rounds.start("mail", 0).id, version=1, checkpoint="c", groups=[], metrics=figures | how
        )
    output = project.run("status", "--store", url, "--model", "mail").stdout
    assert re.search(r"last round .* 2.4e-08 nats .* 1e-05: too small", output)


@pytest.mark.slow
def test_a_judge_without_its_function_fails_with_the_format(project: Project) -> None:
    output = project.run("judge", "lint", "--judge", "my_agent.judge", "--question", "q", "--answer", "a").stdout
    assert (
        "'my_agent.judge' is not of the form module:function or path/file.py:function, such as my_agent.judge:judge"
        in output
    )


@pytest.mark.slow
def test_an_error_is_one_line_and_debug_shows_the_traceback(project: Project) -> None:
    plain = project.run("status", "--project", "a/b")
    assert plain.returncode == 1
    assert plain.stdout.startswith("ratchet: --project: 'a/b' may contain letters, digits")
    assert plain.stdout.count("\n") == 1
    assert "Traceback" in project.run("status", "--project", "a/b", RATCHET_DEBUG="1").stdout


@pytest.mark.slow
def test_status_down_and_policies_work_before_anything_has_run(project: Project) -> None:
    assert "nothing has run yet" in project.run("status").stdout
    assert project.run("down").returncode == 0


@pytest.mark.slow
def test_a_store_is_migrated_verified_and_listed(project: Project) -> None:
    url = f"sqlite:///{project.folder / 'other.db'}"
    assert f"schema none -> {HEAD}" in project.run("store", "migrate", "--store", url).stdout
    assert "nothing to do" in project.run("store", "migrate", "--store", url).stdout
    verified = project.run("store", "verify", "--store", url)
    assert verified.returncode == 0
    assert verified.stdout.startswith("0 messages, 0 toolsets, 0 calls")
    assert verified.stdout.endswith("no findings\n")
    assert "no versions yet" in project.run("policies", "list", "--store", url).stdout


@pytest.mark.slow
def test_a_command_that_reads_makes_no_store_of_a_misspelt_name(project: Project) -> None:
    words = ("trajectories list", "store export", "status", "policies list", "tune runs", "keys list", "audit",
             "judge show grp_1", "feedback export --format unpaired --out rows.jsonl")  # fmt: skip
    for command in map(str.split, words):
        done = project.run(*command, "--store", "typo.db")
        assert (done.returncode, "there is no store at" in done.stdout) == (1, True), command
    assert not (project.folder / "typo.db").exists()


@pytest.mark.slow
def test_a_damaged_message_fails_the_verification(project: Project) -> None:
    database = project.folder / "other.db"
    project.run("store", "migrate", "--store", str(database))
    with sqlite3.connect(database) as connection:
        connection.execute("INSERT INTO messages VALUES (?, x'', 'user', x'7b7d')", (pack_hash("b2:00"),))
    connection.close()
    verified = project.run("store", "verify", "--store", str(database))
    assert verified.returncode == 1
    assert "b2:00" in verified.stdout


def test_a_trainer_without_judge_says_how_to_name_one(project: Project) -> None:
    trainer = project.run("trainer")
    assert trainer.returncode == 2
    assert "--judge module:function" in trainer.stdout


@pytest.mark.slow
def test_a_trainers_log_can_be_json_as_the_proxys_is(project: Project) -> None:
    trainer = project.run("trainer", "--judge", "nowhere:judge", RATCHET_TRAINER__LOG_FORMAT="json")
    (line,) = (json.loads(text) for text in trainer.stdout.splitlines() if "trainer_stopped" in text)
    assert (line["level"], line["logger"]) == ("ERROR", "ratchet.trainer.controller.process")


@pytest.mark.slow
def test_a_doctor_without_a_project_says_what_it_could_not_prove(project: Project) -> None:
    project.write(base_model="./nowhere")
    doctor = project.run("doctor")
    assert doctor.returncode == 1
    assert doctor.stdout.count("FAIL") == 5
    assert "no judge is set" in doctor.stdout
    assert "ratchet up --detach" in doctor.stdout


@pytest.mark.slow
def test_a_doctor_of_a_workflow_takes_what_is_missing_from_the_settings_or_says_so(project: Project) -> None:
    assert "set tuner.tasks" in project.run("doctor", "--workflow", "agent:run").stdout
    assert "set tuner.workflow" in project.run("doctor", "--task", "{}").stdout
    assert "belong together" in project.run("doctor", "--question", "q").stdout
    assert "is not JSON" in project.run("doctor", "--question", "{q", "--answer", "a").stdout
    project.write(tuner={"tasks": "no_such_set"})
    assert "no_such_set" in project.run("doctor", "--workflow", "agent:run").stdout


def test_a_full_disk_is_named_as_the_cause() -> None:
    script = "from ratchet import cli; print(cli._sentence(OSError(28, 'No space left on device', '/a/b')))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "the disk is full at /a/b: free it, or set `state_dir` to another folder\n"


@pytest.mark.slow
def test_keys_are_made_listed_and_revoked(project: Project) -> None:
    url = str(project.folder / "keys.db")
    open_store(url).close()
    assert "no keys" in project.run("keys", "list", "--store", url).stdout
    made = project.run("keys", "create", "--name", "crawler", "--tokens-per-minute", "900",
                       "--max-parallel-requests", "4", "--store", url)  # fmt: skip
    key = made.stdout.splitlines()[0]
    assert key.startswith("rk-")
    listed = project.run("keys", "list", "--store", url).stdout
    assert "crawler" in listed
    assert "900 tokens/min  4 at once" in listed
    rows = json.loads(project.run("keys", "list", "--json", "--store", url).stdout)
    assert key not in json.dumps(rows)
    assert "hash" not in rows[0]
    limited = project.run("keys", "create", "--name", "office", "--agent", "mail", "--agent", "Mail", "--store", url)
    assert "differ by case only" in limited.stdout
    operator = project.run("keys", "create", "--name", "o", "--scope", "operator", "--agent", "mail", "--store", url)
    assert (operator.returncode, "operator's key opens" in operator.stdout) == (2, True)
    limited = project.run("keys", "create", "--name", "office", "--agent", "support", "--agent", "mail", "--store", url)
    assert "for mail, support; the key is not shown again" in limited.stdout
    assert "there is no agent mail" in limited.stdout
    other_case = project.run("keys", "create", "--name", "o", "--agent", "Policy", "--store", url)
    assert (other_case.returncode, "did you mean policy?" in other_case.stdout) == (2, True)
    assert "only mail, support" in project.run("keys", "list", "--store", url).stdout
    listed_agents = json.loads(project.run("keys", "list", "--json", "--store", url).stdout)
    assert [row["agents"] for row in listed_agents] == [None, ["mail", "support"]]
    team = project.run("keys", "create", "--name", "team", "--no-agents", "--model", "judge", "--max-tokens", "900",
                       "--expires-in", "30d", "--store", url)  # fmt: skip
    assert "for judge; it expires at 20" in team.stdout
    assert "there is no model judge in model_list" in team.stdout
    listed = project.run("keys", "list", "--store", url).stdout.splitlines()[-1]
    assert "no agents  models judge  900 tokens/answer" in listed
    changes = ("--tokens-per-day", "5000", "--max-tokens", "0", "--no-expiry")
    raised = project.run("keys", "update", listed.split()[0], *changes, "--store", url)
    assert "(team): no agents, models judge, 5000 tokens/day" in raised.stdout
    assert "0 of 5,000 tokens today" in project.run("keys", "list", "--store", url).stdout
    for wrong, remedy in (
        (("--no-agents",), "--no-agents needs a --model"),
        (("--expires-at", "2020-01-31"), "this time has passed"),
        (("--expires-in", "1d", "--expires-at", "2099-01-31"), "exclude each other"),
        (("--no-models", "--model", "judge"), "--no-models excludes --model"),
    ):
        refused = project.run("keys", "create", "--name", "x", *wrong, "--store", url)
        assert (refused.returncode, remedy in refused.stdout) == (2, True)
    for name in ("", "  ", "two\nlines", "a\x1b[31m"):
        refused = project.run("keys", "create", "--name", name, "--store", url)
        assert (refused.returncode, "give a name on one line" in refused.stdout) == (2, True)
    assert "is revoked" in project.run("keys", "revoke", rows[0]["id"], "--store", url).stdout
    assert "revoked" in project.run("keys", "list", "--store", url).stdout
    assert project.run("keys", "revoke", "key_x", "--store", url).returncode == 1


def test_limits_are_as_large_as_the_stores_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--store", str(tmp_path / "store.db"))
    for option, largest in (
        ("--requests-per-minute", 2**31 - 1), ("--tokens-per-minute", 2**31 - 1), ("--max-tokens", 2**31 - 1),
        ("--max-parallel-requests", 2**31 - 1), ("--tokens-per-day", 2**63 - 1), ("--tokens-per-month", 2**63 - 1),
    ):  # fmt: skip
        assert run(["keys", "create", "--name", "x", option, str(largest), *at]) == 0
        key_id = capsys.readouterr().err.split(":")[0]
        for command in (("create", "--name", "x"), ("update", key_id)):
            assert run(["keys", *command, option, str(largest + 1), *at]) == 2
            assert str(largest) in capsys.readouterr().err
    assert run(["keys", "create", "--name", "x", "--expires-in", "99999999d", *at]) == 2


def test_revoked_and_unknown_keys_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--store", str(tmp_path / "store.db"))
    assert run(["keys", "create", "--name", "x", *at]) == 0
    key_id = capsys.readouterr().err.split(":")[0]
    assert run(["usage", "--key", key_id, *at]) == 0
    assert "no call has ended" in capsys.readouterr().out
    assert run(["usage", "--key", "nope", *at]) == 1
    assert "no key nope" in capsys.readouterr().err
    assert run(["keys", "revoke", key_id, *at]) == 0
    assert run(["keys", "update", key_id, "--max-tokens", "5", *at]) == 1
    assert f"key {key_id} (x) is revoked" in capsys.readouterr().err


def test_a_doctor_that_is_refused_tells_which_keys_the_store_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RATCHET_API_KEYS", raising=False)
    url = str(tmp_path / "store.db")
    store = open_store(url)
    assert missing_key_kinds(store).endswith("RATCHET_API_KEYS is not set")
    for number, (name, scope) in enumerate((("crawler", "agent"), ("boss", "operator"), ("gone", "agent"))):
        made = store.keys.create(name, str(number) * 64, KeyScope(scope))
        if name == "gone":
            store.keys.revoke(made.id)
    monkeypatch.setenv("RATCHET_API_KEYS", "rk-other")
    assert "names crawler, " in missing_key_kinds(store)
    store.close()
