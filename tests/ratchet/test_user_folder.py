"""The wheel in a user's folder with packages and modules of its own names: `ratchet up` and `ratchet demo` run there.

The wheel is installed in a new environment; the dependencies come from the test environment. vLLM is scripted.
tests/e2e/test_user_folder.py trains in such a folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cli.project import INTERRUPTED, ROOT, SCRIPTED_VLLM, wait_for
from tests.harness.cli.user_project import UserProject
from tests.harness.packages import build_wheel, install


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new environment with the wheel."""
    wheel = build_wheel(tmp_path_factory.mktemp("build"))
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture
def user_project(tmp_path: Path, commands: Path) -> Iterator[UserProject]:
    project = UserProject(tmp_path, commands)
    yield project
    project.stop()


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_demo_begins_in_a_folder_without_a_checkout(user_project: UserProject, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    server = packages / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    for package in (server.parent, server.parents[1], server.parents[2]):
        (package / "__init__.py").touch()
    server.write_text(f"import runpy\nrunpy.run_path({str(SCRIPTED_VLLM)!r}, run_name='__main__')\n")
    process = user_project.start(
        "demo", "--rounds", "1", "--state-dir", str(tmp_path / "state"), PYTHONPATH=str(packages)
    )
    running = tmp_path / "state" / "demo" / "run" / "running.json"
    wait_for("the demo's services are started", lambda: running.exists() or process.poll() is not None, seconds=60)
    assert process.poll() is None, process.stdout.read() if process.stdout else ""
    assert (tmp_path / "state" / "demo" / "email_search").is_dir()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in INTERRUPTED, output


def test_no_message_names_a_package_on_an_index() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = (ROOT / name for name in done.stdout.splitlines() if not name.startswith(("CHANGELOG", "tests/")))
    texts = [(path, path.read_bytes()) for path in tracked if path.is_file() and not path.is_symlink()]
    forbidden = (b"pip install ratchet" + b"-rl", b"pip install 'ratchet" + b"-rl[")
    assert [str(path) for path, text in texts if any(words in text for words in forbidden)] == []
