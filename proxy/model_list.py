"""Other models by name, in the form of LiteLLM's `model_list`: judges, teachers and candidates.

    model_list:
      - model_name: judge                       # the `model` of requests; entries of one name form a pool
        litellm_params:
          model: openai/gpt-4.1-mini            # openai/NAME: any OpenAI-compatible server; hosted_vllm/NAME: vLLM
          api_base: https://api.openai.com/v1
          api_key: os.environ/OPENAI_API_KEY    # the name of a variable; a key itself is refused

It holds names and references, never a secret.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from ratchet.proxy.errors import ProxyError

_REFERENCE = "os.environ/"
_OPENAI = "https://api.openai.com/v1"
_PROVIDERS: Mapping[str, Literal["openai", "vllm"]] = {"openai": "openai", "hosted_vllm": "vllm", "vllm": "vllm"}


ModelKeys = Mapping[str, SecretStr]  # by environment variable


class LitellmParams(BaseModel):
    """Where a model is served, and under which name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    model: str = Field(min_length=1)
    api_base: str | None = None
    api_key: str | None = None  # os.environ/NAME
    timeout: float | None = Field(default=None, gt=0)  # seconds for a whole call; null: request_timeout_seconds
    input_cost_per_token: float | None = Field(default=None, ge=0)  # model_info may hold the price instead
    output_cost_per_token: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _nothing_else(cls, given: Any) -> Any:
        unknown = [str(name) for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: unknown; known are {', '.join(cls.model_fields)}")
        return given

    @field_validator("model")
    @classmethod
    def _known_provider(cls, model: str) -> str:
        provider, slash, name = model.partition("/")
        if (slash and provider not in _PROVIDERS) or (slash and not name):
            raise ValueError(
                f"{model!r} starts with an unknown provider: write openai/NAME for any OpenAI-compatible "
                "server with its api_base, or hosted_vllm/NAME for vLLM"
            )
        return model

    @field_validator("api_key")
    @classmethod
    def _reference(cls, key: str | None) -> str | None:
        if key is not None and (not key.startswith(_REFERENCE) or key == _REFERENCE):
            raise ValueError(
                "is a key itself; settings must not hold secrets: put the key into an environment variable and write "
                "api_key: os.environ/NAME_OF_THE_VARIABLE, or omit api_key if the server needs none"
            )
        return key

    @field_validator("api_base")
    @classmethod
    def _plain_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is not a URL; write it like https://api.openai.com/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must be a plain URL, without user, password or query; put a key into api_key")
        return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"

    @model_validator(mode="after")
    def _says_where(self) -> LitellmParams:
        if self.api_base is None and self.kind == "vllm":
            raise ValueError(f"{self.model} needs api_base: the URL of that vLLM server, such as http://host:8001/v1")
        return self

    @property
    def kind(self) -> Literal["openai", "vllm"]:
        """Which request fields the server accepts: OpenAI's only, or vLLM's as well."""
        return _PROVIDERS[self.model.partition("/")[0]] if "/" in self.model else "openai"

    @property
    def served_name(self) -> str:
        """The model's name on that server."""
        return self.model.partition("/")[2] if "/" in self.model else self.model

    @property
    def base(self) -> str:
        """The URL before `/chat/completions`."""
        return self.api_base or _OPENAI

    @property
    def variable(self) -> str | None:
        """The name of the environment variable that holds the key."""
        return self.api_key.removeprefix(_REFERENCE) if self.api_key else None


class ModelEntry(BaseModel):
    """One entry of `model_list`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    model_name: str = Field(min_length=1, max_length=100, pattern=r"^[^@*\s]+$")
    litellm_params: LitellmParams
    model_info: dict[str, Any] = Field(default_factory=dict)  # the user's notes, such as prices


class FallbackRules(BaseModel):
    """The models of `model_list` that answer in place of an agent or another model, in order, by its name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    outage: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="models of `model_list` that answer, in order, if every replica of an agent is down: "
        "`{mail: [big]}`; their answers are never trained (see [production](production.md#fallback-to-another-model))",
    )
    context_length: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="the same for prompts that are longer than the context of the agent's model"
    )

    def only(self, names: Collection[str]) -> FallbackRules:
        """Return the rules of these agents and models."""
        rules = (("outage", self.outage), ("context_length", self.context_length))
        kept = {reason: {name: one[name] for name in one if name in names} for reason, one in rules}
        return FallbackRules.model_validate(kept)

    def check(self, agents: Iterable[str], models: Iterable[str]) -> None:
        """Raise ValueError for a name that is not known, and for a model that falls back to itself."""
        models, known = set(models), {*agents, *models}
        for reason, rules in (("outage", self.outage), ("context_length", self.context_length)):
            for name, others in rules.items():
                if name not in known:
                    raise ValueError(
                        f"fallbacks.{reason} names {name!r}, which is no agent and not in model_list: list it under "
                        "agents, or set model (a name that only an option gives is not known to other commands)"
                    )
                if wrong := [other for other in others if other not in models or other == name]:
                    raise ValueError(
                        f"fallbacks.{reason}: {name} cannot fall back to {wrong[0]!r}: name another model of model_list"
                    )


def keys_in(environ: Mapping[str, str], entries: Iterable[ModelEntry]) -> dict[str, SecretStr]:
    """Return the keys that the entries refer to, by environment variable; unset variables are omitted."""
    variables = [entry.litellm_params.variable for entry in entries]
    return {name: SecretStr(environ[name]) for name in variables if name and environ.get(name)}


def check_keys(entries: Iterable[ModelEntry], environ: Mapping[str, str]) -> None:
    """Raise ProxyError if a key that an entry refers to is not in its variable."""
    entries = tuple(entries)
    keys = keys_in(environ, entries)
    for entry in entries:
        key_of(entry, keys)


def key_of(entry: ModelEntry, keys: ModelKeys) -> str | None:
    """Return an entry's key, or None if it needs none. Raises ProxyError if its variable is not set."""
    variable = entry.litellm_params.variable
    if variable is not None and variable not in keys:
        raise ProxyError(
            f"model_list: {entry.model_name} takes its api_key from the variable {variable}, which is not set: "
            "set it where the proxy is started"
        )
    return keys[variable].get_secret_value() if variable else None
