"""What the proxy can be told. Read once at the door; passed on as values; unknown keys are errors.

API keys come from the environment only and are kept as SHA-256: a settings dump shows no secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from ratchet.proxy.api_keys import KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, hash_key
from ratchet.proxy.model_list import ModelEntry, keys_in
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.store.access.url_credentials import plain_url

UPSTREAM_KEY_VARIABLE = "RATCHET_UPSTREAM_API_KEY"


class ProxySettings(BaseModel):
    """The settings of one proxy process. Sizes are bytes, times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    upstreams: tuple[str, ...] = Field(min_length=1, repr=False)  # base URLs of the vLLM replicas, without /v1
    model: str = Field(min_length=1, max_length=100)  # the alias that agents ask for
    store: str  # database URL or SQLite path
    journal: Path  # folder of the journal; one proxy per folder
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0 takes any free port
    capture: Literal["strict", "relaxed"] = "strict"
    exact_context: Literal["off", "on", "auto"] = "auto"  # continue on the sampled ids; auto: where vLLM offers it
    max_exact_context_bytes: int = Field(default=16 * 2**20, ge=2**16)  # ids of open answers kept in memory
    key_hashes: frozenset[str] = frozenset()  # SHA-256 hex of agents' keys, beside those in the store
    operator_hashes: frozenset[str] = frozenset()  # those that open /api, beside those in the store
    requests_per_minute: int | None = Field(default=None, ge=1)  # of a key without a limit of its own
    tokens_per_minute: int | None = Field(default=None, ge=1)  # of a key without a limit of its own
    allowed_origins: tuple[str, ...] = ()  # of web pages whose scripts may call, with a key; "*": any
    console: bool = True  # the operator's pages under /ui
    redact: tuple[str, ...] = ()  # names of built-in patterns
    redact_patterns: dict[str, str] = Field(default_factory=dict)  # further ones: name -> pattern of RE2
    tool_strict_level: Literal["off", "auto", "function", "parameter"] = "auto"  # of the replicas
    upstream_key: SecretStr | None = None  # sent to vLLM as bearer token
    model_list: tuple[ModelEntry, ...] = ()  # other models by name
    model_keys: dict[str, SecretStr] = Field(default_factory=dict)  # theirs, by variable
    trajectory_idle_seconds: float = Field(
        default=900.0, gt=0
    )  # an open trajectory is forgotten after this much silence
    version_pin_seconds: float = Field(default=30.0, gt=0)  # a trajectory holds its version for this long
    max_linking_bytes: int = Field(default=256 * 2**20, ge=2**16)  # what linking remembers of open trajectories
    max_linking_bytes_per_key: int = Field(default=128 * 2**20, ge=2**16)  # the same, of one key's
    max_conversation_bytes: int = Field(
        default=256 * 2**20, ge=2**16
    )  # conversations that previous_response_id stands for
    max_conversation_bytes_per_key: int = Field(default=128 * 2**20, ge=2**16)  # the same, of one key's
    max_inflight_request_bytes: int = Field(default=2**30, ge=2**16)  # bodies of the requests under way
    max_inflight_request_bytes_per_key: int = Field(default=512 * 2**20, ge=2**16)  # the same, of one key's
    max_connections: int = Field(default=4096, ge=1)
    read_timeout_seconds: float = Field(default=30.0, gt=0)  # for a request to arrive; more for large ones
    write_timeout_seconds: float = Field(default=60.0, gt=0)  # for a client to read on
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    max_messages: int = Field(default=10_000, ge=1)  # in one request
    max_tools: int = Field(default=1_000, ge=1)
    max_json_depth: int = Field(
        default=100, ge=8, le=200
    )  # levels of JSON; what reads it again has the stack for these
    max_json_values: int = Field(default=2_000_000, ge=1000)  # of JSON
    max_journal_bytes: int = Field(default=4 * 2**30, ge=2**16)  # all segments together
    journal_segment_bytes: int = Field(default=8 * 2**20, ge=2**12)
    request_timeout_seconds: float = Field(default=600.0, gt=0)  # for a whole answer; of a stream, for its beginning
    stream_idle_timeout_seconds: float = Field(default=300.0, gt=0)  # of silence in a stream
    max_upstream_response_bytes: int = Field(default=256 * 2**20, ge=1024)  # bytes of an answer that does not stream
    connect_timeout_seconds: float = Field(default=5.0, gt=0)
    max_lag_seconds: float = Field(default=300.0, gt=0)  # seconds that the store may be behind before an alarm
    breaker_failure_threshold: int = Field(default=3, ge=1)  # in a row; then calls go to other replicas
    breaker_reset_seconds: float = Field(default=5.0, gt=0)  # then the replica is probed
    probe_interval_seconds: float = Field(default=5.0, gt=0)  # between looks at a replica
    affinity_slack: int = Field(default=16, ge=1)  # more calls than the least busy replica: others take the rest
    log_calls: bool = True  # one line per call, without content
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = None  # base URL of the OpenTelemetry collector that gets a span per call
    keep_alive_seconds: float = Field(default=15.0, ge=0)  # of silence in a stream before a comment; 0: none
    drain_delay_seconds: float = Field(default=0.0, ge=0)  # at stop: not ready, but still serving
    drain_timeout_seconds: float = Field(default=30.0, gt=0)  # at stop: for running calls to end

    @field_validator("upstreams")
    @classmethod
    def _plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(plain_url(url) for url in urls)

    @field_validator("allowed_origins")
    @classmethod
    def _bare_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urlsplit(origin)
            if origin != "*" and origin != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(f"{origin!r} is no origin; write it like https://app.example.com, or * for any page")
        return origins

    @field_validator("exact_context", "tool_strict_level", mode="before")
    @classmethod
    def _yaml_means_words(cls, value: Any) -> Any:
        """YAML reads a bare `on` and `off` as true and false."""
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @field_validator("model")
    @classmethod
    def _bare_alias(cls, alias: str) -> str:
        if "@" in alias:
            raise ValueError(f"model {alias!r} has an @, which separates alias and version; choose another alias")
        return alias

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if any(entry.model_name == self.model for entry in self.model_list):
            raise ValueError(
                f"model_list: {self.model} is the alias that is trained here; choose another model_name, and give the "
                "alias's own vLLM replicas as upstreams"
            )
        return self

    @model_validator(mode="after")
    def _patterns_can_be_used(self) -> Self:
        if self.redacts:
            from ratchet.proxy.redaction.patterns import RedactionPatterns

            RedactionPatterns(self.redact, self.redact_patterns)
        return self

    @property
    def bounds(self) -> BodyBounds:
        """What a request's JSON may hold."""
        return BodyBounds(
            self.max_body_bytes, self.max_messages, self.max_tools, self.max_json_depth, self.max_json_values
        )

    @property
    def redacts(self) -> bool:
        """Whether anything is redacted."""
        return bool(self.redact or self.redact_patterns)

    @model_validator(mode="after")
    def _journal_holds_segments(self) -> Self:
        # Only whole segments can be given free: in a smaller journal the first one would fill it.
        if self.max_journal_bytes < 4 * self.journal_segment_bytes:
            raise ValueError(
                f"max_journal_bytes {self.max_journal_bytes} is less than four segments of journal_segment_bytes "
                f"{self.journal_segment_bytes}: raise max_journal_bytes or lower journal_segment_bytes"
            )
        return self

    @model_validator(mode="after")
    def _a_body_fits(self) -> Self:
        for name in ("max_inflight_request_bytes", "max_inflight_request_bytes_per_key"):
            if getattr(self, name) < self.max_body_bytes:
                raise ValueError(
                    f"{name} {getattr(self, name)} is less than max_body_bytes {self.max_body_bytes}, so that a "
                    "body of that "
                    f"size is never taken: raise {name} or lower max_body_bytes"
                )
        return self

    @classmethod
    def read(cls, environ: Mapping[str, str], **values: Any) -> ProxySettings:
        """Return the settings from `values` and the secrets from `environ`. Raises pydantic's ValidationError."""
        for field, variable in (("key_hashes", KEYS_VARIABLE), ("operator_hashes", OPERATOR_KEYS_VARIABLE)):
            keys = [key.strip() for key in environ.get(variable, "").split(",") if key.strip()]
            if keys:
                values[field] = frozenset(hash_key(key.encode()) for key in keys)
        if environ.get(UPSTREAM_KEY_VARIABLE):
            values["upstream_key"] = environ[UPSTREAM_KEY_VARIABLE]
        settings = cls(**values)
        return settings.model_copy(update={"model_keys": keys_in(environ, settings.model_list)})
