"""What Helm does with the chart in a cluster: installs, upgrades and failed migrations, at a small API server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import helm
from tests.harness.kubernetes_api import KubernetesApi
from tests.harness.postgres import postgres

pytestmark = [pytest.mark.clients, pytest.mark.postgres, pytest.mark.slow]

HOOK = {("NetworkPolicy", "migrate"), ("ServiceAccount", "migrate"), ("Job", "migrate")}


class Release:
    """The chart in a namespace of a small API server. Helm keeps its records in PostgreSQL."""

    def __init__(self, folder: Path, records: str, namespace: str) -> None:
        self.api = KubernetesApi(folder)
        self._namespace = namespace
        self._environment = {
            "KUBECONFIG": str(self.api.kubeconfig),
            "HELM_DRIVER": "sql",
            "HELM_DRIVER_SQL_CONNECTION_STRING": f"{records}&sslmode=disable",
        }

    def helm(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Install or upgrade the release with the example's values."""
        self.api.changes.clear()
        return helm.helm(
            verb, "ratchet", str(helm.CHART), "--namespace", self._namespace, "--values", str(helm.EXAMPLE), *words,
            environment=self._environment,
        )  # fmt: skip

    def changed(self) -> list[tuple[str, str]]:
        """The kinds and names of what was created or replaced since the last call of Helm, in order."""
        return [(kind, name) for event, kind, name in self.api.changes if event != "DELETED"]


@pytest.fixture(scope="module")
def records() -> Iterator[str]:
    """The URL of a database for Helm's records."""
    with postgres() as url:
        yield url


@pytest.fixture
def release(records: str, tmp_path: Path) -> Iterator[Release]:
    release = Release(tmp_path, records, tmp_path.name.replace("_", "-"))
    yield release
    release.api.close()


def test_the_store_is_migrated_before_anything_else_is_installed(release: Release) -> None:
    done = release.helm("install")
    assert done.returncode == 0, done.stderr
    changed = release.changed()
    assert {*changed[:3]} == HOOK
    assert changed[2] == ("Job", "migrate")
    rendered = {(one["kind"], one["metadata"]["name"]): one for one in helm.manifests(helm.rendered())}
    assert {*changed} == rendered.keys()
    assert ("DELETED", "Job", "migrate") in release.api.changes
    for key, one in release.api.objects.items():
        if key[0] != "Secret":
            assert one.get("spec") == rendered[key].get("spec"), key


def test_a_failed_migration_changes_nothing_and_the_next_upgrade_goes_on(release: Release) -> None:
    release.api.jobs_fail = True
    done = release.helm("install")
    assert done.returncode != 0
    assert {*release.changed()} == HOOK
    release.api.jobs_fail = False
    done = release.helm("upgrade", "--install")
    assert done.returncode == 0, done.stderr
    release.api.jobs_fail = True
    done = release.helm("upgrade", "--set", "proxy.replicas=5")
    assert "Job/" in done.stderr
    assert "migrate not ready" in done.stderr
    assert {*release.changed()} == HOOK
    assert release.api.objects["StatefulSet", "proxy"]["spec"]["replicas"] == 2
    assert release.api.objects.keys() >= HOOK, "for its log, and for a Job that still runs"
    release.api.jobs_fail = False
    done = release.helm("upgrade", "--set", "proxy.replicas=5")
    assert done.returncode == 0, done.stderr
    assert release.api.objects["StatefulSet", "proxy"]["spec"]["replicas"] == 5


def test_an_upgrade_starts_what_was_stopped_for_it_after_the_migration(release: Release) -> None:
    assert release.helm("install").returncode == 0
    stopped = {("StatefulSet", "proxy"), ("StatefulSet", "coordinator"), ("Deployment", "trainer")}
    for kind, name in stopped:
        assert release.api.delete(kind, name)
        assert f"{kind.lower()}/{name}" in (helm.ROOT / "docs" / "kubernetes.md").read_text()
    done = release.helm("upgrade", "--set", "images.proxy.tag=0.2.0")
    assert done.returncode == 0, done.stderr
    created = [(kind, name) for event, kind, name in release.api.changes if event == "ADDED"]
    assert {*created} == HOOK | stopped
    assert created.index(("Job", "migrate")) < min(created.index(one) for one in stopped)
    (container,) = release.api.objects["StatefulSet", "proxy"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/ratchet-proxy:0.2.0"
