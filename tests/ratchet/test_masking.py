"""What looks secret is neither printed nor written, and what is recorded is its owner's alone."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from pathlib import Path

import httpx
import pytest

from ratchet.settings import masking
from ratchet.settings.load_settings import load
from ratchet.store.store import open_store
from ratchet.supervisor import services
from tests.harness.cli.project import Project, wait_for


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:pw@db/prod", "postgresql://u:***@db/prod"),
        ("postgresql://u:p@w@db:5432/prod", "postgresql://u:***@db:5432/prod"),
        ("postgresql://db/prod?user=u&password=pw", "postgresql://db/prod?user=u&password=***"),
        ("postgresql://u@db/prod", "postgresql://u@db/prod"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("mail.db", "mail.db"),
    ],
)
def test_only_the_password_of_a_store_is_hidden(url: str, shown: str) -> None:
    assert masking.mask_store_url(url) == shown
    assert masking.has_password(url) == (url != shown)


def test_variables_are_hidden_by_their_name() -> None:
    given = {"HF_TOKEN": "a", "aws_secret_access_key": "b", "DB_PASSWORD": "c", "TOKENIZERS_PARALLELISM": "false"}
    assert set(masking.mask_variables(given).values()) == {"***", "false"}


def test_secret_arguments_are_hidden_and_others_are_not() -> None:
    given = ["--api-key", "a", "b", "--hf-token=c", "--max-num-batched-tokens", "8", "--tokenizer", "t"]
    hidden = ["--api-key", "***", "***", "--hf-token=***", "--max-num-batched-tokens", "8", "--tokenizer", "t"]
    assert list(masking.mask_arguments(given)) == hidden


def test_the_stores_password_reaches_the_services_by_variable_and_no_file(project: Project) -> None:
    settings = load(project.folder / "ratchet.yaml", {("store",): ("--store", "postgresql://u:pw9@db/p")}, {})
    plan = services.plan_services(settings, config=project.folder / "settings.yaml")
    by_name = {service.name: service.environment for service in plan.services}
    assert by_name["proxy"]["RATCHET_STORE"] == "postgresql://u:pw9@db/p"
    assert "RATCHET_STORE" not in by_name["vllm"]
    services.write_resolved_settings(plan.settings, project.folder / "settings.yaml")
    written = project.folder / "settings.yaml"
    assert "pw9" not in written.read_text()
    again = load(written, environ=by_name["proxy"])
    assert again.store_url == settings.store_url


@pytest.mark.slow
def test_a_secret_of_vllm_is_neither_printed_nor_written_and_the_state_is_the_owners(project: Project) -> None:
    project.write(vllm=project.content["vllm"] | {"env": {"HF_TOKEN": "hf-very", "OMP_NUM_THREADS": "2"}})
    up = project.up()
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=120)
    command = project.state / "logs" / "vllm.log"
    assert str(command) in output
    assert "HF_TOKEN=***" in command.read_text()
    assert "OMP_NUM_THREADS=2" in command.read_text()
    assert "hf-very" not in output
    assert not [file for file in project.state.rglob("*") if file.is_file() and b"hf-very" in file.read_bytes()]
    assert stat.S_IMODE(project.state.stat().st_mode) == 0o700


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [(), ("--store", "mail.db", "--journal", "calls"), ("--store", "mail.db", "--workers", "2")],
)
def test_what_a_proxy_alone_writes_is_readable_by_its_owner_only(project: Project, arguments: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{project.content['proxy']['port']}/health/live"
    before, previous = set(project.folder.rglob("*")), os.umask(0)
    try:
        project.start("proxy", "--upstream", "http://127.0.0.1:1", "--model", "agent", *arguments)
    finally:
        os.umask(previous)

    def serves() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url).status_code == 200
        return False

    wait_for("the proxy serves", serves)
    written = {file for file in project.folder.rglob("*") if file not in before}
    assert {file.name for file in written} & {"store.db-wal", "mail.db-wal"}
    assert [str(file) for file in written if file.lstat().st_mode & 0o077] == []


def test_a_store_is_readable_by_its_owner_only_whatever_creates_it(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with open_store(str(tmp_path / "new" / "mail.db")) as store:
            store.policies.register_base("agent", "base")
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()}
    finally:
        os.umask(previous)
    assert modes == dict.fromkeys(("mail.db", "mail.db-wal", "mail.db-shm"), 0o600)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
