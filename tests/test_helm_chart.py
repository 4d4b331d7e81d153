"""The Helm chart, rendered by a real Helm: valid objects for many values, wrong values refused, deploy/k8s the same."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings, with_values
from ratchet.supervisor import vllm_command
from tests.harness import helm
from tests.harness.clients.program import client_program
from tests.harness.helm import Manifest
from tests.test_kubernetes import _GIVEN, CUSTOM, K8S, OLDEST, PAGE, ROOT, check_restricted, vllm_arguments

pytestmark = pytest.mark.clients

TRAINING = (ROOT / "docs" / "training.md").read_text()
RECIPE = TRAINING.partition("### Kubernetes: JobSet")[2].split("```")[1].removeprefix("yaml")
AGENTS = {
    "mail": {"judge": "/etc/ratchet/judge.py:judge", "keep_loaded_adapters": 6},
    "desk": {"judge": {"kind": "feedback"}},
}
VALUES: dict[str, dict[str, Any]] = {
    "the example": {},
    "several proxies with workers": {
        "proxy": {"replicas": 4, "resources": {"limits": {"memory": "12Gi"}}, "storage": {"size": "30Gi"}},
        "settings": {"proxy": {"workers": 4, "max_journal_bytes": 8589934592, "trusted_proxies": ["10.0.0.0/8"]}},
    },
    "two agents with a judge of a file": {
        "settings": {"agents": AGENTS},
        "settingsFiles": {"judge.py": 'def judge(trajectory, response):\n    return float("}}" in response)\n'},
    },
    "another model and larger adapters": {
        "settings": {
            "base_model": "openai/gpt-oss-20b",
            "learner": {"lora_r": 48},
            "trainer": {"keep_loaded_adapters": 0},
            "adapters": {"max_cache_gb": 2.5},
            "vllm": {
                "tool_call_parser": "openai", "max_model_len": 131072, "max_num_seqs": 64, "tensor_parallel_size": 2,
                "max_loras": 8, "max_cpu_loras": 40, "gpu_memory_utilization": 0.85, "dtype": "bfloat16",
                "enforce_strict_tool_calling": True, "env": {"VLLM_LOGGING_LEVEL": "WARNING"},
                "extra_args": ["--kv-cache-dtype=fp8"],
            },
            "proxy": {"tool_strict_level": "auto"},
        },
        "vllm": {"replicas": 3, "resources": {"limits": {"nvidia.com/gpu": 2}}},
    },
    "a model without tools": {"settings": {"vllm": {"tool_call_parser": "none"}}},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "dashboard": {"enabled": True},
    },
    "no policies": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "narrow policies": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"agents": "yes"}}}],
            "monitoring": [],
            "database": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/24"}}], "ports": [{"port": 6432}]}],
            "external": [],
        }
    },
    "learner of two machines": yaml.safe_load(RECIPE),
    "learner and vLLM elsewhere": {
        "learner": {"enabled": False},
        "vllm": {"enabled": False, "urls": ["http://gpu1:8001", "http://gpu2:8001"]},
        "settings": {"learner": {"url": "http://gpu3:8002"}},
    },
    "an ingress": {
        "ingress": {"enabled": True, "className": "nginx", "host": "ratchet.example", "tlsSecret": "tls",
                    "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"}},
    },
    "a cluster's own ways": {
        "images": {"proxy": {"repository": "registry.example/a/proxy", "tag": "7@sha256:" + "0" * 64}},
        "imagePullSecrets": [{"name": "registry"}],
        "secrets": {"objectStore": "", "store": "database"},
        "vllm": {
            "nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
            "serviceAccountAnnotations": {"iam": "role"}, "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "storage": {"storageClassName": "fast"},
        },
        "migrate": {"nodeSelector": {"pool": "small"}, "env": [{"name": "PGSSLMODE", "value": "require"}]},
    },
}  # fmt: skip


@pytest.fixture(params=VALUES)
def values(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of values."""
    return _file(tmp_path, VALUES[request.param])


def _file(folder: Path, content: Mapping[str, Any]) -> Path:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _objects(values: Path) -> dict[tuple[str, str], Manifest]:
    objects = helm.manifests(helm.rendered("--values", str(values)))
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(by_name) == len(objects)
    return by_name


def _settings(objects: Mapping[tuple[str, str], Manifest], folder: Path) -> Settings:
    """The ConfigMap as a pod reads it."""
    for name, text in objects["ConfigMap", "settings"]["data"].items():
        (folder / name).write_text(text)
    return load(folder / "ratchet.yaml", environ=_GIVEN)


def _pod_templates(objects: Mapping[tuple[str, str], Manifest]) -> dict[str, Manifest]:
    return {name: one["spec"]["template"] for (_, name), one in objects.items() if "template" in one.get("spec", {})}


def test_every_object_is_valid_and_every_pod_restricted(values: Path) -> None:
    objects = _objects(values)
    for one in objects.values():
        if one["kind"] == "JobSet":
            assert one["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
            (group,) = one["spec"]["replicatedJobs"]
            one = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "learner"}, **group["template"]}
        if one["kind"] not in CUSTOM:
            for version in (OLDEST, kubernetes_validate.latest_version()):
                kubernetes_validate.validate(one, version, strict=True)
        if "template" in one.get("spec", {}):
            check_restricted(one, objects)
        if one["kind"] == "StatefulSet":
            assert ("Service", one["spec"]["serviceName"]) in objects
        if one["kind"] == "NetworkPolicy":  # a rule without peers would let all in
            assert all(rule["from"] for rule in one["spec"].get("ingress", ()))


def test_helm_finds_nothing_to_complain_about(values: Path) -> None:
    done = helm.helm("lint", "--strict", str(helm.CHART), "--values", str(helm.EXAMPLE), "--values", str(values))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


def test_the_settings_are_accepted_by_every_service(values: Path, tmp_path: Path) -> None:
    settings = _settings(_objects(values), tmp_path)
    settings.proxy_before(("dns+http://vllm:8000",))
    for agent in settings.agents_by_name.values():
        with_values(agent, "trainer", vllm=("dns+http://vllm:8000",))
    given = yaml.safe_load(values.read_text()).get("settings", {})
    assert settings.given_in("proxy").items() >= given.get("proxy", {}).items()


def test_vllm_is_started_as_up_starts_it(values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    objects = _objects(values)
    settings = _settings(objects, tmp_path)
    commands = {
        name: template["spec"]["containers"][0]["command"] for name, template in _pod_templates(objects).items()
    }
    replicas = [word for word in commands["proxy"] if word.startswith(("http", "dns+http"))]
    assert [word for word in commands["trainer"] if word.startswith(("http", "dns+http"))] == replicas
    if "vllm" not in commands:
        assert replicas == VALUES["learner and vLLM elsewhere"]["vllm"]["urls"]
        return
    (container,) = objects["StatefulSet", "vllm"]["spec"]["template"]["spec"]["containers"]
    planned = vllm_command.build_command(settings, 8000, gpu=True)
    assert container["args"] == vllm_arguments(planned)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    theirs = {"RATCHET_ADAPTER_CACHE", "PYTHONPATH"}
    assert {k: v for k, v in planned.environment.items() if k not in theirs}.items() <= environment.items()


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("proxy.replica=3", "'replica'"),
        ("proxy.replicas=two", "/proxy/replicas"),
        ("vllm.resources.limits.memory=64GB", "/vllm/resources/limits/memory"),
        ("networkpolicy.enabled=true", "'networkpolicy'"),
        ("settings.base_model=", "/settings/base_model"),
        ("settings.agents=null", "/settings"),
        ("settings.adapters.store=models", "/settings/adapters/store"),
        ("settings.proxy.prot=8000", "'prot'"),
        ("settings.proxy.port=8001", "/settings/proxy/port"),
        ("settings.agents.mail.jugde=ruler", "'jugde'"),
        ("settings.store=postgresql://me:secret@db/ratchet", "'store'"),
        ("settings.learner.machines=2", "'machines'"),
        ("settings.vllm.tool_call_parser=null", "/settings/vllm/tool_call_parser"),
        ("settings.vllm.tool_call_parser=auto", "/settings/vllm/tool_call_parser"),
        ("settings.vllm.max_cpu_loras=5", "settings.vllm.max_cpu_loras: 5 is too small; set 9"),
        ("learner.enabled=false", "/settings/learner/url"),
        ("vllm.enabled=false", "/vllm/urls"),
        ("ingress.enabled=true", "/ingress/host"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(assignment: str, named: str) -> None:
    done = helm.helm(
        "template", "ratchet", str(helm.CHART), "--values", str(helm.EXAMPLE),
        "--set", "settings.trainer.keep_loaded_adapters=3", "--set", assignment,
    )  # fmt: skip
    assert done.returncode != 0
    assert named in done.stderr


def test_the_chart_names_what_has_to_be_set() -> None:
    done = helm.helm("template", "ratchet", str(helm.CHART))
    for key in ("base_model", "adapters/store", "agents"):
        assert f"/settings/{key}" in done.stderr


def test_deploy_k8s_is_what_the_chart_renders() -> None:
    for name, text in helm.plain_files().items():
        assert (K8S / name).read_text() == text, f"{name}: run `make manifests`"


def test_kustomize_makes_the_objects_that_helm_installs(tmp_path: Path) -> None:
    monitoring = _file(tmp_path, VALUES["monitoring"])
    installed = _objects(monitoring)
    del installed["ServiceMonitor", "ratchet"]["metadata"]["labels"]  # of that Prometheus
    applied = {
        (one["kind"], one["metadata"]["name"]): one
        for folder in ("deploy/k8s", "deploy/k8s/monitoring")
        for one in _kustomized(folder)
    }
    assert applied.pop(("Namespace", "ratchet"))
    for one in applied.values():
        assert one["metadata"].pop("namespace") == "ratchet"
    for template in _pod_templates(installed).values():
        annotations = template["metadata"].pop("annotations", {})
        assert annotations.keys() <= {"checksum/settings"}
    settings = [both["ConfigMap", "settings"]["data"] for both in (applied, installed)]
    assert yaml.safe_load(settings[0].pop("ratchet.yaml")) == yaml.safe_load(settings[1].pop("ratchet.yaml"))
    assert applied == installed


def _kustomized(folder: str) -> list[Manifest]:
    command = [str(client_program("helm", "kubectl")), "kustomize", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return helm.manifests(done.stdout)


def test_the_hook_needs_nothing_that_the_chart_installs_after_it() -> None:
    objects = helm.manifests(helm.rendered())
    hooks = {one["kind"]: one for one in objects if "helm.sh/hook" in one["metadata"].get("annotations", {})}
    assert hooks.keys() == {"ServiceAccount", "NetworkPolicy", "Job"}
    weights = {}
    for kind, one in hooks.items():
        annotations = one["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        policies = annotations["helm.sh/hook-delete-policy"].split(",")
        assert "before-hook-creation" in policies  # a Job cannot be changed
        assert "hook-failed" not in policies, "its log, and a Job that still runs, stay"
        weights[kind] = int(annotations.get("helm.sh/hook-weight", 0))
    assert weights["Job"] > max(weights["ServiceAccount"], weights["NetworkPolicy"])
    pod = hooks["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == hooks["ServiceAccount"]["metadata"]["name"]
    assert all("emptyDir" in volume for volume in pod["volumes"])
    assert "envFrom" not in container
    assert [entry["valueFrom"].keys() for entry in container["env"]] == [{"secretKeyRef"}]
    ports = [port["port"] for rule in hooks["NetworkPolicy"]["spec"]["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 5432]


def test_every_object_that_the_page_restarts_or_stops_for_an_upgrade_is_in_the_chart() -> None:
    objects = {f"{kind.lower()}/{name}" for kind, name in _objects(helm.EXAMPLE)}
    named = set(re.findall(r"\b(?:statefulset|deployment)/\w+", PAGE))
    assert {"statefulset/proxy", "deployment/trainer"} <= named <= objects


def test_a_change_of_settings_restarts_the_pods_that_do_not_follow_it(tmp_path: Path) -> None:
    slots = {"max_loras": 6, "max_cpu_loras": 40}
    before = _templates(tmp_path, {"vllm": slots})
    assert _changed(before, _templates(tmp_path, {"vllm": slots, "agents": AGENTS})) == set()
    assert _changed(before, _templates(tmp_path, {"vllm": {**slots, "max_model_len": 8192}})) == {"vllm"}
    readers = {
        "proxy": {"proxy", "coordinator"},
        "trainer": {"trainer"},
        "learner": {"trainer", "learner"},
        "adapters": {"proxy", "coordinator", "trainer", "learner", "vllm"},
    }
    changes = {"proxy": {"workers": 2}, "trainer": {"groups_per_round": 8}, "learner": {"learning_rate": 0.001},
               "adapters": {"store": "s3://other/ratchet"}}  # fmt: skip
    for section, change in changes.items():
        after = _templates(tmp_path, {"vllm": slots, section: change})
        assert _changed(before, after) == readers[section], section


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Manifest]:
    return _pod_templates(_objects(_file(folder, {"settings": settings})))


def _changed(before: Mapping[str, Manifest], after: Mapping[str, Manifest]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ({}, 90),
        ({"drain_timeout_seconds": 600}, 660),
        ({"drain_delay_seconds": 15.5, "drain_timeout_seconds": "99.5"}, 166),
        ({"drain_delay_seconds": 0, "drain_timeout_seconds": 1}, 90),
        ({"drain_delay_seconds": None, "drain_timeout_seconds": 3600}, 3650),
    ],
)
def test_pods_have_the_time_that_the_drain_settings_take(times: Any, seconds: int, tmp_path: Path) -> None:
    templates = _templates(tmp_path, {"proxy": times})
    for name in ("proxy", "coordinator"):
        assert templates[name]["spec"]["terminationGracePeriodSeconds"] == seconds


def test_machines_of_a_learner_reach_each_other_and_the_trainer_the_first(tmp_path: Path) -> None:
    objects = _objects(_file(tmp_path, VALUES["learner of two machines"]))
    assert ("StatefulSet", "learner") not in objects
    spec = objects["JobSet", "learner"]["spec"]
    (group,) = spec["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    _settings(objects, tmp_path)
    process = load(
        tmp_path / "ratchet.yaml", environ={k: v for k, v in given.items() if k.startswith("RATCHET_")}
    ).learner
    assert process.machines == job["parallelism"] == job["completions"] == 2
    assert process.leader == f"learner-{group['name']}-0-0.{spec['network']['subdomain']}"
    assert process.num_processes == container["resources"]["limits"]["nvidia.com/gpu"] == 8
    selector = objects["Service", "learner"]["spec"]["selector"]
    assert selector == {"app.kubernetes.io/name": "learner", "batch.kubernetes.io/job-completion-index": "0"}
    peer = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "learner"}}}
    policy = objects["NetworkPolicy", "learner"]["spec"]
    assert {"from": [peer]} in policy["ingress"]
    assert {"to": [peer]} in policy["egress"]


def test_a_package_of_the_chart_is_whole_and_has_the_version_of_the_project(tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = helm.helm("package", str(helm.CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    package = tmp_path / f"ratchet-{version}.tgz"
    options = ("--set", "dashboard.enabled=true")
    assert helm.rendered(*options, chart=package) == helm.rendered(*options)
    assert f"registry.example/ratchet-proxy:{version}\n" in helm.rendered()
    assert yaml.safe_load((helm.CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"


def test_the_notes_name_the_address_and_the_agents() -> None:
    done = helm.helm(
        "install", "ratchet", str(helm.CHART), "--namespace", "prod", "--values", str(helm.EXAMPLE), "--dry-run=client"
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "http://proxy.prod:8000/v1 with the model mail" in notes
