"""A small Kubernetes API server in memory, for a real Helm that installs and upgrades: objects, watches, Jobs that end.

It stores what it is sent. It has no controllers but one: a Job is finished as soon as it is made. It checks no schema,
merges no fields (an apply replaces the object) and knows no rights.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import yaml

KINDS: Mapping[str, Mapping[str, str]] = {
    "v1": {"ConfigMap": "configmaps", "Secret": "secrets", "Service": "services", "ServiceAccount": "serviceaccounts",
           "Namespace": "namespaces", "Pod": "pods"},
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "networking.k8s.io/v1": {"Ingress": "ingresses", "NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
}  # fmt: skip
Object = dict[str, Any]
_SECONDS = 60.0  # that a watch lasts at most


class KubernetesApi:
    """A running API server with an empty namespace.

    `changes` has every change of an object but Helm's own records: (verb, kind, name), oldest first.
    """

    def __init__(self, folder: Path) -> None:
        self.objects: dict[tuple[str, str], Object] = {}  # by kind and name
        self.changes: list[tuple[str, str, str]] = []
        self.jobs_fail = False
        self.events: list[tuple[str, Object]] = []
        self._changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._closing = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test", "users": [{"name": "test", "user": {}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }  # fmt: skip
        self.kubeconfig.write_text(yaml.safe_dump(content))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def put(self, given: Object) -> Object:
        """Create or replace an object."""
        key = (given["kind"], given["metadata"]["name"])
        with self._changed:
            old = self.objects.get(key)
            meta = {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}
            meta |= {k: v for k, v in (old or {}).get("metadata", {}).items() if k in meta}
            one = {**given, "metadata": {**given["metadata"], **meta, "resourceVersion": str(len(self.events) + 1)}}
            if one["kind"] == "Job":
                ended = "Failed" if self.jobs_fail else "Complete"
                one["status"] = {"conditions": [{"type": ended, "status": "True", "reason": ended, "message": ended}]}
            self.objects[key] = one
            self._record("MODIFIED" if old else "ADDED", one)
        return one

    def delete(self, kind: str, name: str) -> Object | None:
        """Delete an object; return it."""
        with self._changed:
            one = self.objects.pop((kind, name), None)
            if one is not None:
                self._record("DELETED", one)
        return one

    def events_since(self, seen: int) -> list[tuple[str, Object]]:
        """Wait for events after the first `seen`; return them, or none if the server closes or nothing happens."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or len(self.events) > seen, _SECONDS)
            return [] if self._closing else self.events[seen:]

    def _record(self, event: str, one: Object) -> None:
        self.events.append((event, one))
        if one["kind"] != "Secret":
            self.changes.append((event, one["kind"], one["metadata"]["name"]))
        self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ClassVar[KubernetesApi]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_request(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        body = yaml.safe_load(content) if content else None
        parts = url.path.strip("/").split("/")
        if (found := _discovery(parts)) is not None:
            return self._answer(200, found)
        version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        kinds = {plural: kind for kind, plural in KINDS.get(version, {}).items()}
        if not rest or rest[0] not in kinds:
            return self._answer(404, _status(404, "NotFound"))
        return self._resource(version, kinds[rest[0]], rest[1] if len(rest) > 1 else None, query, body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def _resource(self, version: str, kind: str, name: str | None, query: Mapping[str, str], body: Any) -> None:
        if self.command == "GET" and name is None:
            chosen = [one for (other, _), one in self.api.objects.items() if other == kind and _matches(one, query)]
            if query.get("watch") in ("1", "true"):
                return self._watch(version, kind, chosen, query)
            listed = {"apiVersion": version, "kind": f"{kind}List", "metadata": {"resourceVersion": "1"}}
            return self._answer(200, {**listed, "items": chosen})
        if self.command == "DELETE":
            gone = self.api.delete(kind, name or "")
            return self._answer(200, gone) if gone else self._answer(404, _status(404, "NotFound"))
        if self.command == "GET":
            known = self.api.objects.get((kind, name or ""))
            return self._answer(200, known) if known else self._answer(404, _status(404, "NotFound"))
        if self.command == "POST" and (kind, body["metadata"]["name"]) in self.api.objects:
            return self._answer(409, _status(409, "AlreadyExists"))
        return self._answer(200, self.api.put({"apiVersion": version, "kind": kind, **body}))

    def _watch(self, version: str, kind: str, chosen: list[Object], query: Mapping[str, str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for event, one in self._events(version, kind, chosen, query):
                text = json.dumps({"type": event, "object": one}).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def _events(
        self, version: str, kind: str, chosen: list[Object], query: Mapping[str, str]
    ) -> Iterator[tuple[str, Object]]:
        seen = len(self.api.events)
        if query.get("sendInitialEvents") == "true":
            yield from (("ADDED", one) for one in chosen)
            end = {"resourceVersion": str(seen + 1), "annotations": {"k8s.io/initial-events-end": "true"}}
            yield "BOOKMARK", {"apiVersion": version, "kind": kind, "metadata": end}
        while new := self.api.events_since(seen):
            seen += len(new)
            yield from ((event, one) for event, one in new if one["kind"] == kind and _matches(one, query))

    def _answer(self, code: int, content: Mapping[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _discovery(parts: list[str]) -> Object | None:
    """What the server has, if a path asks for it."""
    if parts == ["version"]:
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        groups = [version.split("/") for version in KINDS if "/" in version]
        listed = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in groups]
        named = [{"name": group, "versions": [one], "preferredVersion": one}
                 for (group, _), one in zip(groups, listed, strict=True)]  # fmt: skip
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
    if parts == ["openapi", "v3"]:
        paths = [f"apis/{version}" if "/" in version else f"api/{version}" for version in KINDS]
        return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in paths}}
    if parts[:2] == ["openapi", "v3"]:
        return _openapi("/".join(parts[3:]))
    version = "/".join(parts[1:])
    if parts[0] not in ("api", "apis") or version not in KINDS:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": plural, "kind": kind, "namespaced": kind != "Namespace", "singularName": "", "verbs": verbs}
        for kind, plural in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _openapi(version: str) -> Object:
    """A document without schemas: the server checks fields itself, says each operation."""
    group, _, bare = version.rpartition("/")
    paths = {}
    for kind, plural in KINDS[version].items():
        named = {"group": group, "version": bare, "kind": kind}
        checked = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        paths[f"/{plural}/{{name}}"] = {
            "patch": {"x-kubernetes-group-version-kind": named, "parameters": [checked], "responses": {}}
        }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.33.0"}, "paths": paths}


def _matches(one: Object, query: Mapping[str, str]) -> bool:
    labels = one["metadata"].get("labels", {})
    wanted = [term.split("=") for term in query.get("labelSelector", "").split(",") if term]
    named = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and named in ("", one["metadata"]["name"])


def _status(code: int, reason: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": reason,
        "code": code,
    }
