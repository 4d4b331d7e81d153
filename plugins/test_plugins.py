"""What holds for every plug-in: how it is named, what it needs, what it registers, and the commands of its README."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ratchet import __version__
from ratchet.trainer.user_code import OWN_PLUGINS
from tests.test_documents import wrong_commands

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(file.parent for file in Path(__file__).parent.glob("*/pyproject.toml"))


def project(folder: Path) -> dict[str, Any]:
    """Return the table `project` of a plug-in's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_is_a_distribution_of_this_version(folder: Path) -> None:
    found = project(folder)
    assert found["name"] == f"ratchet-rl-{folder.name}"
    assert found["version"] == __version__
    assert f"ratchet-rl=={__version__}" in found["dependencies"]
    assert "Private :: Do Not Upload" in found["classifiers"]
    checks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert {f"plugins/{folder.name}", f"plugins/{folder.name}/tests"} <= set(checks["mypy"]["mypy_path"])
    (contract,) = [one for one in checks["importlinter"]["contracts"] if one["name"].endswith("no plug-in")]
    assert f"ratchet_{folder.name.replace('-', '_')}" in contract["forbidden_modules"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_readme_of_a_plugin_says_how_it_is_installed_and_its_commands_can_be_typed(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    assert f"pip install ./plugins/{folder.name}" in page
    assert f"| [`{folder.name}`](plugins/{folder.name}/README.md) |" in (ROOT / "README.md").read_text()
    assert wrong_commands(page) == []


def test_what_is_not_installed_is_named_with_the_distribution_that_registers_it() -> None:
    registered: dict[str, dict[str, str]] = {}
    for folder in FOLDERS:
        for group, points in project(folder)["entry-points"].items():
            registered.setdefault(group, {}).update(dict.fromkeys(points, folder.name))
    assert registered == OWN_PLUGINS
