"""The wheel in a user's folder with packages and modules of its own names: `ratchet up` and `ratchet demo` run there.

The wheel is built and unpacked; the other packages come from the test environment. vLLM is scripted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cli.project import ROOT, SCRIPTED_VLLM, Project, wait_for
from tests.test_wheel import build_wheel

PACKAGES = ("store", "proxy", "trainer", "tuner", "examples")
JUDGE = """
from store.orders import total
from proxy import NAME as proxy_name
from trainer import NAME as trainer_name


def judge(trajectory):
    assert (proxy_name, trainer_name) == ("the user's proxy", "the user's trainer")
    return float(total())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds the wheel's package and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("build"))) as packed:
        packed.extractall(folder)
    assert {entry.name for entry in folder.iterdir() if not entry.name.endswith(".dist-info")} == {"ratchet"}
    return folder


class UserProject(Project):
    """A project in a folder with packages named as Ratchet's components, and a logging.py."""

    def __init__(self, folder: Path, site: Path) -> None:
        super().__init__(folder)
        self._site = site
        for name in PACKAGES:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(f'NAME = "the user\'s {name}"\n')
        (folder / "store" / "orders.py").write_text("def total():\n    return 1\n")
        (folder / "shop_judge.py").write_text(JUDGE)
        (folder / "logging.py").write_text("raise ImportError('this is not the standard library')\n")

    def _environ(self, environ: dict[str, str]) -> dict[str, str]:
        return super()._environ({"PYTHONPATH": str(self._site)} | environ)


@pytest.fixture
def user_project(tmp_path: Path, site: Path) -> Iterator[UserProject]:
    project = UserProject(tmp_path, site)
    yield project
    project.stop()


def test_up_serves_in_a_folder_with_packages_of_the_same_names(user_project: UserProject) -> None:
    user_project.up()
    found = json.loads(user_project.run("status", "--json").stdout)
    assert found["ready"]
    assert {name: found["services"][name]["state"] for name in ("vllm", "proxy")} == {
        "vllm": "running", "proxy": "running",
    }  # fmt: skip
    log = (user_project.state / "logs" / "proxy.log").read_text()
    assert "Traceback" not in log


def test_a_judge_imports_the_users_own_packages(user_project: UserProject) -> None:
    linted = user_project.run(
        "judge", "lint", "--judge", "shop_judge:judge", "--task", "x", "--answer", "Oslo", "--wrong", "Rome"
    )
    assert "every answer" in linted.stdout or linted.returncode in (1, 3), linted.stdout
    assert "No module named" not in linted.stdout
    assert "cannot import" not in linted.stdout


def test_the_demo_begins_in_a_folder_without_a_checkout(user_project: UserProject, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    server = packages / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    for package in (server.parent, server.parents[1], server.parents[2]):
        (package / "__init__.py").touch()
    server.write_text(f"import runpy\nrunpy.run_path({str(SCRIPTED_VLLM)!r}, run_name='__main__')\n")
    path = os.pathsep.join((str(packages), str(user_project._site)))
    process = user_project.start("demo", "--rounds", "1", "--state-dir", str(tmp_path / "state"), PYTHONPATH=path)
    running = tmp_path / "state" / "demo" / "run" / "running.json"
    wait_for("the demo's services are started", lambda: running.exists() or process.poll() is not None, seconds=60)
    assert process.poll() is None, process.stdout.read() if process.stdout else ""
    assert (tmp_path / "state" / "demo" / "email_search").is_dir()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output


def test_no_message_names_a_package_on_an_index() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = (ROOT / name for name in done.stdout.splitlines() if not name.startswith(("CHANGELOG", "tests/")))
    texts = [(path, path.read_bytes()) for path in tracked if path.is_file() and not path.is_symlink()]
    forbidden = (b"pip install ratchet" + b"-rl", b"pip install 'ratchet" + b"-rl[")
    assert [str(path) for path, text in texts if any(words in text for words in forbidden)] == []
