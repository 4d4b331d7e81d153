"""A project whose state folder is deleted while it runs: it is still found and can be stopped."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import project_lock
from tests.harness.cli.project import Project, is_alive


@pytest.mark.slow
def test_a_project_whose_folder_was_deleted_is_named_refused_and_ended(project: Project) -> None:
    up = project.up()
    pids = project.pids()
    shutil.rmtree(project.folder / ".ratchet")
    status = project.run("status").stdout
    assert f"project default: up (pid {up.pid}), but its state folder was deleted while it ran" in status
    assert json.loads(project.run("status", "--json").stdout)["orphaned_pid"] == up.pid
    second = project.run("up")
    assert second.returncode == 1
    assert f"already up (pid {up.pid}, whose state folder was deleted while it ran)" in second.stdout
    assert "`ratchet down --project default`" in second.stdout
    down = project.run("down")
    assert down.returncode == 0
    assert f"up (pid {up.pid}) with its services" in down.stdout
    up.communicate(timeout=120)
    assert not [pid for pid in pids if is_alive(pid)]
    assert project.run("down").stdout == "project default: nothing was running\n"
    assert not json.loads(project.run("status", "--json").stdout)["orphaned_pid"]


def test_a_folder_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = StateFolder(tmp_path / "state")
    project_lock.write_user_pidfile(state)
    (folder,) = tmp_path.glob("ratchet-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert project_lock.orphaned_pid(state) is not None
    folder.chmod(0o777)  # anybody could have written it
    assert project_lock.running_supervisor(state) is None
    project_lock.write_user_pidfile(state)
    project_lock.remove_user_pidfile(state)
    folder.chmod(0o700)
    project_lock.remove_user_pidfile(state)
    assert project_lock.running_supervisor(state) is None
