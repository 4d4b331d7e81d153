"""The manifests of deploy/k8s: valid, restricted, and true about commands, settings, ports and routes.

They are what the Helm chart renders, which tests/test_helm_chart.py checks with a real Helm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import click
import httpx
import kubernetes_validate
import pytest
import yaml

from ratchet.cli import cli
from ratchet.options import open_store_for_command
from ratchet.proxy.coordinator.conversations.conversation_cache import MAX_CONVERSATION_BYTES
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import SECRETS, Settings, with_values
from ratchet.supervisor import vllm_command
from ratchet.trainer.learner_service.service import LearnerApp
from ratchet.trainer.observability.metrics import MetricsRegistry
from tests.harness import helm
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served

ROOT = Path(__file__).parents[1]
K8S = ROOT / "deploy" / "k8s"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
OLDEST = "1.30"  # as docs/kubernetes.md says
CUSTOM = {"ServiceMonitor"}  # a custom resource of the Prometheus Operator, of which the validator has no schema
_GIVEN = dict.fromkeys(SECRETS - {"RATCHET_ALARM_WEBHOOK_URL"}, "x" * 16) | {
    "RATCHET_STORE": "postgresql://ratchet:x@db/x"
}

Manifest = dict[str, Any]


def _documents(kustomization: Path) -> list[Manifest]:
    listed = yaml.safe_load((kustomization / "kustomization.yaml").read_text())["resources"]
    files = [kustomization / name for name in listed if name.endswith(".yaml")]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


OBJECTS = _documents(K8S)
BY_NAME = {(one["kind"], one["metadata"]["name"]): one for one in OBJECTS}
WORKLOADS = [one for one in OBJECTS if "template" in one.get("spec", {})]
POLICIES = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "NetworkPolicy"}


def _pod(name: str) -> Manifest:
    found = next(one for one in WORKLOADS if one["metadata"]["name"] == name)
    return cast("Manifest", found["spec"]["template"]["spec"])


def _container(name: str) -> Manifest:
    (only,) = _pod(name)["containers"]
    return cast("Manifest", only)


def _environment(name: str) -> dict[str, str]:
    """The variables of a container; those of secrets get a value that can be read."""
    entries = _container(name)["env"]
    return {entry["name"]: entry.get("value", _GIVEN.get(entry["name"], "x")) for entry in entries}


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load(K8S / "ratchet.yaml", environ=_GIVEN)


def _ports(container: Mapping[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", ())}


def _bytes(quantity: str) -> int:
    units = {"Mi": 20, "Gi": 30}
    return int(quantity[:-2]) << units[quantity[-2:]]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_every_object_is_valid(version: str) -> None:
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)
    wrong = {**OBJECTS[0], "specification": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)
    assert f"Kubernetes {OLDEST}" in PAGE


def test_every_file_is_part_of_a_kustomization() -> None:
    for folder in (K8S, K8S / "monitoring"):
        content = yaml.safe_load((folder / "kustomization.yaml").read_text())
        listed = {
            *content["resources"],
            *(name for one in content.get("configMapGenerator", ()) for name in one["files"]),
        }
        assert {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"} <= listed


def test_the_settings_are_those_of_proxy_trainer_and_learner(settings: Settings) -> None:
    proxy = settings.proxy_before(("dns+http://vllm:8000",))
    learner = settings.learner
    assert settings.has_judge
    assert _ports(_container("proxy")) == {"http": proxy.port}
    (coordinators,) = proxy.coordinator
    assert _is_service(coordinators, "coordinator")
    assert _coordinator_options()["coordinator_listen"] == f"0.0.0.0:{_ports(_container('coordinator'))['http']}"
    assert _ports(_container("learner")) == {"http": learner.port}
    for agent in settings.agents_by_name.values():
        trainer = with_values(agent, "trainer", vllm=("dns+http://vllm:8000",))
        assert _ports(_container("trainer")) == {"metrics": trainer.metrics_port}
        assert trainer.metrics_host == "0.0.0.0"
    assert proxy.host == learner.host == "0.0.0.0"
    assert _is_service(learner.url or "", "learner")
    assert _is_service(settings.trainer.resample.proxy_url or "", "proxy")


def _is_service(url: str, name: str) -> bool:
    """Whether a URL is that of a Service, whose port is a port of the pods that it selects."""
    parts, service = urlsplit(url.removeprefix("dns+")), BY_NAME["Service", name]["spec"]
    (port,) = service["ports"]
    assert service["selector"] == {"app.kubernetes.io/name": name}
    assert _ports(_container(name))[port["targetPort"]] == port["port"]
    return (parts.hostname, parts.port) == (name, port["port"])


def _coordinator_options() -> Mapping[str, Any]:
    """The options of the coordinator's command."""
    words = _container("coordinator")["command"]
    command = cast("click.Group", cli).get_command(click.Context(cli), "proxy")
    assert command is not None
    return command.make_context("proxy", words[words.index("proxy") + 1 :]).params


@pytest.mark.parametrize("name", ["coordinator", "proxy", "trainer", "learner", "migrate"])
def test_every_command_can_be_typed_and_every_variable_is_a_setting(name: str) -> None:
    program, *words = _container(name)["command"]
    assert program == "ratchet"
    command: click.Command = cli
    context = cli.make_context(program, list(words))
    while isinstance(command, click.Group):
        word, *words = [*context._protected_args, *context.args]
        found = command.get_command(context, word)
        assert found is not None, word
        command, context = found, found.make_context(word, list(words), parent=context)
    for replicas in ("upstreams", "vllm"):
        assert all(_is_service(url, "vllm") for url in context.params.get(replicas) or ())
    if name != "migrate":
        assert "/etc/ratchet/ratchet.yaml" in _container(name)["command"]
        assert {"name": "settings", "mountPath": "/etc/ratchet", "readOnly": True} in _container(name)["volumeMounts"]
    ours = {key: value for key, value in _environment(name).items() if key.startswith("RATCHET_")}
    load(K8S / "ratchet.yaml", environ=ours)  # refuses a variable that is no setting


def test_vllm_is_started_as_up_starts_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # `up` hands it on; other tests set it
    container, environment = _container("vllm"), _environment("vllm")
    planned = vllm_command.build_command(load(K8S / "ratchet.yaml", environ={}), 8000, gpu=True)
    assert container["command"][1:] == list(planned.arguments[2:4])  # -m MODULE
    assert container["args"] == vllm_arguments(planned)
    theirs = {"RATCHET_ADAPTER_CACHE", "PYTHONPATH"}  # a folder of the pod; the image has the plug-in installed
    assert {
        key: value for key, value in planned.environment.items() if key not in theirs
    }.items() <= environment.items()
    known = set(re.findall(r"RATCHET_\w+", (vllm_command.LORA_RESOLVER / "ratchet_lora_resolver.py").read_text()))
    assert {key for key in environment if key.startswith("RATCHET_")} <= known
    assert environment["RATCHET_ADAPTER_STORE"] == settings.adapters.store
    assert _ports(container) == {"http": 8000}
    assert settings.proxy.tool_strict_level == "off"


def vllm_arguments(planned: vllm_command.VllmCommand) -> list[str]:
    """The arguments of `ratchet up` as a container's."""
    words = " ".join(planned.arguments[4:]).replace("127.0.0.1", "0.0.0.0")
    return re.sub(r" (?!--)", "=", words).split()


def test_every_probe_asks_a_route_that_the_service_has(tmp_path: Path, store_file: Path) -> None:
    learner = LearnerApp(cast("Any", None), None, 1)
    answered = {"learner": {route.path for route in cast("Any", learner.asgi.routes)}}
    with open_store_for_command(str(store_file)) as store:
        registry = MetricsRegistry(store)
        url = f"http://127.0.0.1:{registry.serve('127.0.0.1', 0)}"
        answered["trainer"] = _answering(url, _probes("trainer"))
        with served(ScriptedVllm()) as vllm, running(vllm, store, tmp_path) as proxy:
            answered["vllm"] = _answering(vllm, _probes("vllm"))
            answered["proxy"] = _answering(proxy.url, _probes("proxy"))
            answered["coordinator"] = _answering(proxy.url, _probes("coordinator"))
    for name, paths in answered.items():
        assert _probes(name) <= paths, name
        ports = {probe["httpGet"]["port"] for key, probe in _container(name).items() if key.endswith("Probe")}
        assert ports <= _ports(_container(name)).keys()


def _probes(name: str) -> set[str]:
    found = {probe["httpGet"]["path"] for key, probe in _container(name).items() if key.endswith("Probe")}
    assert found, name
    return found


def _answering(url: str, paths: set[str]) -> set[str]:
    return {path for path in paths if httpx.get(url + path).status_code == 200}


def test_the_proxy_has_the_time_the_disk_and_the_memory_that_its_settings_take(settings: Settings) -> None:
    proxy = settings.proxy_before(("dns+http://vllm:8000",))
    assert (
        _pod("proxy")["terminationGracePeriodSeconds"] >= proxy.drain_delay_seconds + proxy.drain_timeout_seconds + 30
    )
    (claim,) = BY_NAME["StatefulSet", "proxy"]["spec"]["volumeClaimTemplates"]
    assert _bytes(claim["spec"]["resources"]["requests"]["storage"]) > 2 * proxy.max_journal_bytes
    assert {"name": claim["metadata"]["name"], "mountPath": "/state"} in _container("proxy")["volumeMounts"]
    bounded = proxy.max_linking_bytes + MAX_CONVERSATION_BYTES + proxy.max_inflight_request_bytes
    assert _bytes(_container("proxy")["resources"]["limits"]["memory"]) > bounded + 2**30
    for name in ("trainer", "vllm", "learner"):
        sizes = [one["emptyDir"]["sizeLimit"] for one in _pod(name)["volumes"] if one["name"] in ("state", "cache")]
        assert all(_bytes(size) > settings.adapters.max_cache_bytes for size in sizes)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_every_pod_is_restricted(workload: Manifest) -> None:
    name = workload["metadata"]["name"]
    check_restricted(workload, BY_NAME)
    if "serviceName" in workload["spec"]:
        assert BY_NAME["Service", workload["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    selector = workload["spec"].get("selector", {"matchLabels": {"app.kubernetes.io/name": name}})
    assert selector["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def check_restricted(workload: Manifest, by_name: Mapping[tuple[str, str], Manifest]) -> None:
    """Assert that pods have the least rights: no root, no capabilities, no token, no folder of their node."""
    pod, name = workload["spec"]["template"]["spec"], workload["metadata"]["name"]
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == name
    assert (
        pod["automountServiceAccountToken"] is by_name["ServiceAccount", name]["automountServiceAccountToken"] is False
    )
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {"requests", "limits"} <= container["resources"].keys()
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    assert all(volume.keys() & {"emptyDir", "configMap", "ephemeral"} for volume in pod["volumes"])


def test_secrets_come_by_reference_and_the_page_makes_each() -> None:
    assert not [one for one in OBJECTS if one["kind"] == "Secret"]
    for name in ("coordinator", "proxy", "trainer", "learner", "vllm", "migrate"):
        for entry in _container(name)["env"]:
            if entry["name"] in {*SECRETS, "RATCHET_STORE"}:
                reference = entry["valueFrom"]["secretKeyRef"]
                assert re.search(rf"secret generic {reference['name']} [^\n]*--from-literal={reference['key']}=", PAGE)
        for source in _container(name).get("envFrom", ()):
            assert f"`{source['secretRef']['name']}`" in PAGE or f"generic {source['secretRef']['name']} " in PAGE


def test_only_proxy_coordinator_and_trainer_reach_vllm_and_every_connection_has_a_policy(settings: Settings) -> None:
    assert POLICIES["default"]["podSelector"] == {}
    assert "ingress" not in POLICIES["default"]
    assert POLICIES.keys() == {"default", *(one["metadata"]["name"] for one in WORKLOADS)}
    assert _sources("vllm") == {"coordinator", "proxy", "trainer"}
    assert _sources("coordinator") == {"proxy", "monitoring"}
    assert _sources("learner") == {"trainer", "monitoring"}
    for client, server in (
        ("proxy", "vllm"), ("proxy", "coordinator"), ("coordinator", "vllm"), ("trainer", "vllm"),
        ("trainer", "learner"), ("trainer", "proxy"),
    ):  # fmt: skip
        (port,) = _ports(_container(server)).values()
        assert (server, port) in set(_targets(client))
    for name in ("coordinator", "proxy", "trainer", "migrate"):
        assert (None, 5432) in set(_targets(name))


def _sources(name: str) -> set[str]:
    peers = [peer for rule in POLICIES[name]["ingress"] for peer in rule["from"]]
    return {next(iter(peer[kind]["matchLabels"].values())) for peer in peers for kind in peer}


def _targets(name: str) -> Iterator[tuple[str | None, int]]:
    for rule in POLICIES[name]["egress"]:
        for peer in rule.get("to", [None]):
            for port in rule["ports"]:
                yield peer and peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"], port["port"]


def test_prometheus_finds_a_metrics_port_of_every_service_that_it_selects() -> None:
    (monitor,) = _documents(K8S / "monitoring")
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    for name in selected["values"]:
        service = BY_NAME["Service", name]
        assert service["metadata"]["labels"][selected["key"]] == name
        assert ports & {port["name"] for port in service["spec"]["ports"]}
    assert "vllm" not in selected["values"], "Prometheus would need a way to vLLM, over which adapters can be loaded"


def test_the_schema_of_the_chart_knows_the_settings_that_the_code_has() -> None:
    assert helm.SCHEMA.read_text() == helm.schema_text(), "run `make manifests`"


def test_every_value_that_the_page_names_is_in_the_schema() -> None:
    schema = json.loads(helm.SCHEMA.read_text())
    settings = set(_keys(schema["definitions"]["settings"]))
    known = {*_keys(schema), *settings, *(f"settings.{key}" for key in settings)}
    found = {name for name in re.findall(r"`(\w+(?:\.\w+)+)`", PAGE) if name.partition(".")[0] in schema["properties"]}
    assert len(found) > 15
    assert {name for name in found if not name.endswith(".yaml")} <= known


def _keys(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every key that a schema names, with dots."""
    for key, part in schema.get("properties", {}).items():
        yield ".".join((*path, key))
        yield from _keys(part, (*path, key))
