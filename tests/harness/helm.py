"""The Helm chart as a real Helm renders it, and what is written from it and from the code.

`python -m tests.harness.helm` (`make manifests`) rewrites the settings' names in the chart's schema, and deploy/k8s:
what the chart renders for deploy/helm/example.yaml. A test compares both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ratchet.settings.load_settings import known_keys
from ratchet.settings.setting_errors import ANY_NAME
from tests.harness.clients.program import client_program

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "ratchet"
EXAMPLE = ROOT / "deploy" / "helm" / "example.yaml"
K8S = ROOT / "deploy" / "k8s"
SCHEMA = CHART / "values.schema.json"

# Settings that the chart decides by other values, or that have no meaning in it.
_OF_THE_CHART = {
    *(("model",), ("project",), ("state_dir",), ("store",)),
    *(("learner", key) for key in ("devices", "leader", "leader_port", "machine_rank", "machines")),
    *(("vllm", key) for key in ("command", "devices", "host", "port", "start_timeout_seconds")),
}
_SOURCE = re.compile(r"^---\n# Source: ratchet/templates/([\w-]+)\.yaml\n", re.MULTILINE)
_HEADER = "# Rendered from deploy/helm by `make manifests`.\n"
_MONITORING = ("serviceMonitor.enabled=true", "dashboard.enabled=true")

Manifest = dict[str, Any]


def helm(*words: str, environment: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    """Run Helm, without the user's settings of it and of a cluster."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("HELM_", "KUBE"))}
    return subprocess.run(
        [str(client_program("helm", "helm")), *words],
        cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def rendered(*words: str, chart: Path = CHART) -> str:
    """Return what `helm template` prints for the example's values and further options. Fails with Helm's message."""
    done = helm("template", "ratchet", str(chart), "--namespace", "ratchet", "--values", str(EXAMPLE), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(text: str) -> list[Manifest]:
    """Return the objects of rendered text."""
    return [one for one in yaml.safe_load_all(text) if one]


def settings_schema(tree: Any = None, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema of ratchet.yaml in the values: the names of settings; Ratchet itself checks what they hold."""
    keys = known_keys() if tree is None else tree
    if not isinstance(keys, Mapping):
        return {}
    schema: dict[str, Any] = {"type": "object"}
    if ANY_NAME in keys:
        return schema | {"additionalProperties": settings_schema(keys[ANY_NAME], (*path, ANY_NAME))}
    places = [(*path, key) for key in sorted(keys) if (*path, key) not in _OF_THE_CHART]
    properties = {place[-1]: settings_schema(keys[place[-1]], place) for place in places}
    return schema | {"additionalProperties": False, "properties": properties}


def schema_text() -> str:
    """Return values.schema.json with the settings that the code has."""
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"]["settings"] = settings_schema()
    return json.dumps(schema, indent=1) + "\n"


def plain_files() -> dict[str, str]:
    """Return the rendered files of deploy/k8s by name.

    Without the checksums, by which an upgrade with Helm restarts pods, and with the settings as a file of their own, to
    which kustomize can add others.
    """
    parts = _SOURCE.split(rendered(*(word for value in _MONITORING for word in ("--set", value))))[1:]
    by_template: dict[str, list[str]] = defaultdict(list)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        by_template[name].append(re.sub(r"^ *annotations: \{checksum/.*\n", "", text, flags=re.MULTILINE))
    del by_template["dashboard"]  # kustomize makes it from deploy/grafana
    (settings,) = by_template.pop("settings")
    files = {f"{name}.yaml": _HEADER + "---\n".join(documents) for name, documents in by_template.items()}
    files["monitoring/servicemonitor.yaml"] = files.pop("servicemonitor.yaml")
    comment = settings.partition("\n")[0]
    files["ratchet.yaml"] = f"{_HEADER}{comment}\n{yaml.safe_load(settings)['data']['ratchet.yaml']}"
    return files


if __name__ == "__main__":
    SCHEMA.write_text(schema_text())
    for name, text in plain_files().items():
        (K8S / name).write_text(text)
