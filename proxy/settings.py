"""The proxy's settings: read once at start, passed on as values; unknown keys are errors.

API keys come from environment variables only and are stored as SHA-256: a dump of the settings shows no secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from ratchet.proxy.agent_names import check_agent_names
from ratchet.proxy.api_keys import KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, hash_key
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.model_list import FallbackRules, ModelEntry, keys_in
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.store.access.replicas import check_entry, http_url

TOKEN_VARIABLE = "RATCHET_COORDINATOR_TOKEN"
UPSTREAM_KEY_VARIABLE = "RATCHET_UPSTREAM_API_KEY"
ALARM_WEBHOOK_VARIABLE = "RATCHET_ALARM_WEBHOOK_URL"
_MIN_TOKEN_LENGTH = 16
_CORES_PER_WORKER, _MOST_AUTO_WORKERS = 8, 4  # vLLM, trainer and learner need cores, too


def workers_for(cores: int) -> int:
    """Return how many workers serve best: one takes a thousand short calls a second, and each more costs memory."""
    return min(_MOST_AUTO_WORKERS, max(1, cores // _CORES_PER_WORKER))


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use, at least 1: by its affinity, and by its container's `cpu.max`."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        return cores


def listen_address(value: str) -> tuple[str, int]:
    """Return host and port of `ADDRESS:PORT`. Raises ValueError."""
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != value:
        raise ValueError("coordinator_listen is not an address and a port: write it like 0.0.0.0:8009 or [::]:8009")
    return host, port


class AgentLimits(BaseModel):
    """Limits of one agent, over all keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    requests_per_minute: int | None = Field(
        None, ge=1, description="request limit per proxy, or over all proxies with one coordinator; null: no limit"
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="token limit, counted in the same way; null: no limit"
    )


class ProxySettings(BaseModel):
    """The settings of one proxy process. Sizes are in bytes, times in seconds.

    No user sets the fields with `exclude`: they follow from the project's other settings, or are secrets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    workers: int = Field(
        1,
        ge=0,
        le=64,
        description="processes that serve the port; with more than one, another process, the coordinator, assigns "
        "their calls to trajectories (see [production.md](production.md)); 0: a coordinator only; `auto`, which "
        "`ratchet up` takes by default: one for every eight cores, from 1 to 4",
    )
    coordinator: tuple[str, ...] = Field(
        (),
        description="URLs of the coordinators that this proxy's workers use instead of their own: those that listen at "
        "`coordinator_listen` on this or other machines; of several, one is active and the others are standbys; "
        "`dns+http://NAME:PORT` is every address of a name; needs RATCHET_COORDINATOR_TOKEN",
    )
    coordinator_listen: str | None = Field(
        None,
        description="`ADDRESS:PORT` where this proxy's coordinator also answers the workers of other machines; needs "
        "RATCHET_COORDINATOR_TOKEN; null: it serves only its own workers",
    )
    coordinator_token: SecretStr | None = Field(
        None, exclude=True, description="the secret that coordinators and workers of all machines share"
    )
    upstreams: tuple[str, ...] = Field(
        repr=False, exclude=True, description="the vLLM replicas: URLs without `/v1`, or lists of them"
    )
    model: str = Field(
        "", max_length=100, exclude=True, description="the one agent, by the name that it sends as `model`"
    )
    agents: tuple[str, ...] = Field(
        (), exclude=True, description="several agents, by the names that they send as `model`"
    )
    store: str = Field(exclude=True, description="database URL or SQLite path of the store")
    journal: Path = Field(exclude=True, description="folder of the journal; one proxy per folder")
    host: str = Field("127.0.0.1", description="address to listen on; any address but loopback requires API keys")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes any free port")
    tls_certificate: Path | None = Field(
        None,
        description="PEM file with the certificate, and those between it and the authority's, to serve HTTPS; read "
        "again when it changes ([security](security.md#tls)); null: HTTP",
    )
    tls_key: Path | None = Field(
        None, description="PEM file with the certificate's key, without a password; null: in `tls_certificate`"
    )
    capture: Literal["strict", "relaxed"] = Field(
        "strict",
        description="`strict`: a call is on disk before its answer ends, unless the disk is full; `relaxed`: later",
    )
    exact_context: Literal["off", "on", "auto"] = Field(
        "auto",
        description="continue a conversation on its sampled token ids instead of its re-tokenized text: `off`, `on`, "
        "or `auto` if vLLM offers the endpoints (see [exact-context.md](exact-context.md))",
    )
    key_hashes: frozenset[str] = Field(
        frozenset(), exclude=True, description="SHA-256 (hex) of agents' API keys, in addition to those in the store"
    )
    operator_hashes: frozenset[str] = Field(
        frozenset(),
        exclude=True,
        description="SHA-256 (hex) of operator keys for `/api`, in addition to those in the store",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="request limit of an agent's key without a limit of its own, per proxy; null: no limit"
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="token limit (prompt and completion) of an agent's key without a limit of its own, per proxy; "
        "null: no limit",
    )
    max_parallel_requests: int | None = Field(
        None, ge=1, description="agents' requests that run at once; others wait in a queue; null: no limit"
    )
    max_parallel_requests_per_key: int | None = Field(
        None, ge=1, description="the same for a key without a limit of its own; without keys, for everyone together"
    )
    max_waiting_requests: int = Field(
        512,
        ge=0,
        description="requests that wait for a limit of parallel requests; beyond it a request gets 429 or 503 with "
        "`retry-after`; 0: none waits",
    )
    max_waiting_requests_per_key: int = Field(64, ge=0, description="the same for one key")
    max_waiting_seconds: float = Field(
        10.0, gt=0, description="longest wait for a limit of parallel requests, seconds; then 429 or 503"
    )
    agent_limits: dict[str, AgentLimits] = Field(
        default_factory=dict,
        description="limits of agents by name, over all keys and per proxy: "
        "`{mail: {requests_per_minute: 600, tokens_per_minute: 200000}}`",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="origins of web pages that may send requests from a browser (`https://app.example.com`, or `*`); "
        "they need an API key; without keys, listed pages of this machine may call models",
    )
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="addresses and networks (`10.0.0.0/8`) of the proxies in front, from which `x-forwarded-for` is "
        "accepted as the client's address in logs and the audit log",
    )
    audit_days: float = Field(
        90.0, gt=0, description="days that the audit log keeps operators' requests ([security](security.md#audit-log))"
    )
    console: bool = Field(True, description="serve the operator's console at `/ui` ([console.md](console.md))")
    redact: tuple[str, ...] = Field(
        (),
        description="built-in patterns to redact before anything is written: `secret`, `email`, `iban`, `card`, "
        "`phone`; see [security](security.md)",
    )
    redact_patterns: dict[str, str] = Field(
        default_factory=dict, description="further patterns to redact, by name, in RE2 syntax"
    )
    tool_strict_level: Literal["off", "auto", "function", "parameter"] = Field(
        "auto",
        description="when vLLM constrains tool calls by a grammar, whose tokens are not trained: its "
        "`--tool-strict-level` (`auto`: if a tool is `strict` or `parallel_tool_calls` is false; `function`, "
        "`parameter`: with any tool), or `off` for `VLLM_ENFORCE_STRICT_TOOL_CALLING=0`; `ratchet up` sets it from "
        "`vllm.enforce_strict_tool_calling`",
    )
    upstream_key: SecretStr | None = Field(None, exclude=True, description="bearer token for vLLM")
    alarm_webhook_url: SecretStr | None = Field(
        None, exclude=True, description="URL that gets a message for each alarm"
    )
    model_list: tuple[ModelEntry, ...] = Field((), exclude=True, description="other models by name, in LiteLLM's form")
    fallbacks: FallbackRules = Field(FallbackRules(), description="models that answer in place of others")
    model_keys: dict[str, SecretStr] = Field(
        default_factory=dict, exclude=True, description="API keys of `model_list`, by environment variable"
    )
    trajectory_idle_seconds: float = Field(
        900.0, gt=0, description="an open trajectory without a call for this long is closed for linking, seconds"
    )
    version_pin_seconds: float = Field(
        30.0, gt=0, description="a trajectory pins its policy version for this long after its last call, seconds"
    )
    max_linking_bytes: int = Field(
        256 * 2**20,
        ge=2**16,
        description="memory for linking, bytes: about 0.9 KB for each answer of an open trajectory; half of it for "
        "one key; if it is full, the key with the most bytes loses its least recently used trajectories",
    )
    max_inflight_request_bytes: int = Field(
        2**30,
        ge=2**16,
        description="request bodies in flight, bytes; beyond it a request gets 503 with `retry-after`, and a key above "
        "half of it 429; at least `max_body_bytes`",
    )
    max_connections: int = Field(4096, ge=1, description="concurrent client connections; beyond it a client gets 503")
    read_timeout_seconds: float = Field(
        30.0, gt=0, description="time for a request to arrive, plus a second for each 10 kB, seconds; then it gets 408"
    )
    write_timeout_seconds: float = Field(
        60.0, gt=0, description="a client that reads nothing for this long counts as disconnected, seconds"
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="largest request body, bytes")
    max_messages: int = Field(10_000, ge=1, description="messages (for Responses: input items) in one request, at most")
    max_tools: int = Field(1_000, ge=1, description="tool definitions in one request, at most")
    max_json_depth: int = Field(100, ge=8, le=200, description="nesting levels of a request's JSON, 8 to 200")
    max_json_values: int = Field(
        200_000,
        ge=1000,
        description="JSON values in one request; ten numbers of a list, such as token ids, count as one",
    )
    max_journal_bytes: int = Field(
        4 * 2**30,
        ge=2**16,
        description="all journal segments together, bytes; at least four segments. Up to two pre-allocated segments "
        "come on top; with less than eight segments nothing is pre-allocated",
    )
    journal_segment_bytes: int = Field(
        8 * 2**20, ge=2**12, description="size at which a journal segment is closed, bytes"
    )
    request_timeout_seconds: float = Field(
        600.0, gt=0, description="time for vLLM's complete response, seconds; for a stream, until it starts"
    )
    stream_idle_timeout_seconds: float = Field(
        300.0,
        gt=0,
        description="longest silence within a stream, seconds (`request_timeout_seconds` if that is less); the length "
        "of a stream is not limited",
    )
    max_lag_seconds: float = Field(
        300.0, gt=0, description="`/health/backlog` answers 503 if the store is this far behind the journal, seconds"
    )
    breaker_failure_threshold: int = Field(
        3, ge=1, description="consecutive failures of a replica after which calls go to the others"
    )
    breaker_reset_seconds: float = Field(
        5.0, gt=0, description="a failed replica is probed after this long, seconds, and gets calls again if it answers"
    )
    probe_interval_seconds: float = Field(5.0, gt=0, description="pause between two probes of a replica, seconds")
    log_calls: bool = Field(True, description="log one line per call when it ends, never its content")
    log_format: Literal["text", "json"] = Field(
        "text", description="`text`: logfmt after time and level; `json`: one object per line"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="`debug`, `info`, `warning` or `error`; above `info` the lines of the calls are not written",
    )
    otlp_endpoint: Annotated[str, AfterValidator(http_url)] | None = Field(
        None,
        description="base URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span per call; null: "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`, see [tracing.md](tracing.md)",
    )
    keep_alive_seconds: float = Field(
        15.0,
        ge=0,
        description="silence in a stream after which a comment (`: keep-alive`) is sent, with the response's headers "
        "if they are not sent yet, seconds; 0: never",
    )
    drain_delay_seconds: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="on stop, `/health/ready` answers 503 for this long while calls are still accepted, so that a load "
        "balancer can react, seconds, at most 3600; `ratchet up`: none",
    )
    drain_timeout_seconds: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="on stop, time for running calls to finish, seconds, at most 3600; `ratchet up` gives at most 4",
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _by_cores(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip().isdigit():
            if value != "auto":
                raise ValueError("give a number of processes, or `auto`")
            return workers_for(usable_cores())
        return value

    @field_validator("coordinator", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return tuple(one.strip() for one in value.split(",") if one.strip()) if isinstance(value, str) else value

    @field_validator("coordinator")
    @classmethod
    def _coordinator_urls(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_entry, entries))

    @field_validator("coordinator_listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            listen_address(value)
        return value

    @model_validator(mode="after")
    def _something_runs(self) -> Self:
        if self.workers == 0 and self.coordinator_listen is None:
            raise ValueError("workers is 0, so that nothing is served: set coordinator_listen to run a coordinator")
        return self

    def check_token(self) -> None:
        """Raise ProxyError without a token that protects the coordinators. Services that run none need none."""
        setting = "coordinator_listen" if self.coordinator_listen else "coordinator" if self.coordinator else None
        token = self.coordinator_token.get_secret_value() if self.coordinator_token else ""
        if setting and len(token) < _MIN_TOKEN_LENGTH:
            raise ProxyError(
                f"{setting} needs {TOKEN_VARIABLE}, a secret of at least {_MIN_TOKEN_LENGTH} characters, the same on "
                "every machine: set it, for example to the output of `openssl rand -hex 24`"
            )

    @property
    def has_own_coordinator(self) -> bool:
        """Whether this proxy runs a coordinator."""
        return not self.coordinator or self.coordinator_listen is not None

    @property
    def is_one_process(self) -> bool:
        """Whether one process places the calls that it serves."""
        return self.workers == 1 and not self.coordinator and self.coordinator_listen is None

    @field_validator("upstreams")
    @classmethod
    def _replicas(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_entry, entries))

    @field_validator("alarm_webhook_url")
    @classmethod
    def _is_a_url(cls, url: SecretStr | None) -> SecretStr | None:
        try:
            parts = urlsplit(url.get_secret_value()) if url is not None else None
            valid = parts is None or (parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0)
        except ValueError:  # its text would contain the URL
            valid = False
        if not valid:
            raise ValueError(f"{ALARM_WEBHOOK_VARIABLE} is not a URL: set one like https://host/path, or unset it")
        return url

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            try:
                ip_network(entry)
            except ValueError as error:
                raise ValueError(f"{error}; write an address or a network, like 10.0.0.7 or 10.0.0.0/8") from error
        return entries

    @field_validator("allowed_origins")
    @classmethod
    def _bare_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urlsplit(origin)
            if origin != "*" and origin != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(
                    f"{origin!r} is not an origin; write it like https://app.example.com, or * for any page"
                )
        return origins

    @field_validator("exact_context", "tool_strict_level", mode="before")
    @classmethod
    def _booleans_to_words(cls, value: Any) -> Any:
        """YAML reads a bare `on` and `off` as true and false."""
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="before")
    @classmethod
    def _one_agent_in_short(cls, values: Any) -> Any:
        """`model: NAME` is short for `agents: [NAME]`."""
        if not isinstance(values, dict) or not values.get("model"):
            return values
        if values.get("agents"):
            raise ValueError("model and agents exclude each other: name every agent under agents")
        return {**values, "agents": (values["model"],)}

    @model_validator(mode="after")
    def _agents_have_names(self) -> Self:
        if not self.agents and not self.model_list:
            raise ValueError("no agent is named: set model, or agents")
        if self.agents and not self.upstreams:
            raise ValueError("an agent needs a vLLM replica: set upstreams")
        check_agent_names(self.agents, [entry.model_name for entry in self.model_list])
        if unknown := sorted(self.agent_limits.keys() - set(self.agents)):
            raise ValueError(
                f"agent_limits names {unknown[0]!r}, which is not an agent: there are {', '.join(self.agents)}"
            )
        self.fallbacks.check(self.agents, [entry.model_name for entry in self.model_list])
        return self

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> Self:
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key is set without tls_certificate: set both, or neither for HTTP")
        return self

    @model_validator(mode="after")
    def _patterns_compile(self) -> Self:
        if self.redacts:
            from ratchet.proxy.redaction.patterns import RedactionPatterns

            RedactionPatterns(self.redact, self.redact_patterns)
        return self

    @property
    def bounds(self) -> BodyBounds:
        """The limits of a request's JSON."""
        return BodyBounds(
            self.max_body_bytes, self.max_messages, self.max_tools, self.max_json_depth, self.max_json_values
        )

    @property
    def trusted_hosts(self) -> list[str]:
        """`trusted_proxies`, and as a socket for both families shows those of IPv4: `::ffff:10.0.0.7`."""
        networks = [ip_network(entry) for entry in self.trusted_proxies]
        mapped = [f"::ffff:{one.network_address}/{96 + one.prefixlen}" for one in networks if one.version == 4]
        return [*map(str, networks), *mapped]

    @property
    def redacts(self) -> bool:
        """Whether anything is redacted."""
        return bool(self.redact or self.redact_patterns)

    @model_validator(mode="after")
    def _journal_fits_segments(self) -> Self:
        # Space is freed by whole segments: in a smaller journal the first segment would fill it.
        if self.max_journal_bytes < 4 * self.journal_segment_bytes:
            raise ValueError(
                f"max_journal_bytes {self.max_journal_bytes} is less than four segments of journal_segment_bytes "
                f"{self.journal_segment_bytes}: raise max_journal_bytes or lower journal_segment_bytes"
            )
        return self

    @model_validator(mode="after")
    def _body_fits(self) -> Self:
        if self.max_inflight_request_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_inflight_request_bytes {self.max_inflight_request_bytes} is less than max_body_bytes "
                f"{self.max_body_bytes}, so that a body of that size could never be accepted: raise "
                "max_inflight_request_bytes or lower max_body_bytes"
            )
        return self


def secret_values(environ: Mapping[str, str], models: Sequence[ModelEntry]) -> dict[str, Any]:
    """Return the fields that variables hold: keys, as hashes, and tokens."""
    values: dict[str, Any] = {"model_keys": keys_in(environ, models)}
    for field, variable in (("key_hashes", KEYS_VARIABLE), ("operator_hashes", OPERATOR_KEYS_VARIABLE)):
        keys = [key.strip() for key in environ.get(variable, "").split(",") if key.strip()]
        if keys:
            values[field] = frozenset(hash_key(key.encode()) for key in keys)
    for field, variable in (
        ("upstream_key", UPSTREAM_KEY_VARIABLE),
        ("coordinator_token", TOKEN_VARIABLE),
        ("alarm_webhook_url", ALARM_WEBHOOK_VARIABLE),
    ):
        if environ.get(variable):
            values[field] = environ[variable]
    return values
