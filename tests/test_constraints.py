"""deploy/constraints.txt pins what pyproject.toml asks for, with hashes and without addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = (ROOT / "deploy" / "constraints.txt").read_text()


def test_every_version_is_pinned_with_a_hash_and_no_line_names_an_index() -> None:
    allowed = re.compile(r"#.*|[\w.-]+==[\w.!]+( ; [^\\/]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert [line for line in PINS.splitlines() if not allowed.fullmatch(line)] == []
    for block in re.split(r"\n(?=\S)", PINS)[1:]:
        assert "--hash=" in block, block
    assert "://" not in PINS


def test_the_pins_satisfy_the_package_the_trainer_the_demo_and_the_development_tools() -> None:
    pins = {name: Version(version) for name, version in re.findall(r"^([\w.-]+)==([\w.!]+)", PINS, re.MULTILINE)}
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"], *extras["trainer"], *extras["demo"], *extras["postgres"]]
    for line in [*wanted, *PYPROJECT["dependency-groups"]["dev"]]:
        requirement = Requirement(line)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, line
