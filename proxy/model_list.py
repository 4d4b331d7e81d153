"""Other models by name, as the settings say them: LiteLLM's `model_list`, for judges, teachers and candidates.

    model_list:
      - model_name: judge                       # what is asked for as `model`; the same name again makes a pool
        litellm_params:
          model: openai/gpt-4.1-mini            # openai/NAME: any OpenAI-compatible server; hosted_vllm/NAME: vLLM
          api_base: https://api.openai.com/v1
          api_key: os.environ/OPENAI_API_KEY    # the name of a variable; a key itself is refused

Holds names and references, never a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from ratchet.proxy.errors import StartError

_REFERENCE = "os.environ/"
_OPENAI = "https://api.openai.com/v1"
_PROVIDERS: Mapping[str, Literal["openai", "vllm"]] = {"openai": "openai", "hosted_vllm": "vllm", "vllm": "vllm"}


class LitellmParams(BaseModel):
    """Where a model is served, and by what name."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model: str = Field(min_length=1)
    api_base: str | None = None
    api_key: str | None = None  # os.environ/NAME
    timeout: float | None = Field(default=None, gt=0)  # seconds of a whole call; null: request_timeout_seconds
    input_cost_per_token: float | None = Field(default=None, ge=0)  # a price; model_info may hold it as well
    output_cost_per_token: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _nothing_else(cls, given: Any) -> Any:
        unknown = [str(name) for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not known here; known are {', '.join(cls.model_fields)}")
        return given

    @field_validator("model")
    @classmethod
    def _known_provider(cls, model: str) -> str:
        provider, slash, name = model.partition("/")
        if (slash and provider not in _PROVIDERS) or (slash and not name):
            raise ValueError(
                f"{model!r} begins with no provider that is served here: write openai/NAME for any OpenAI-compatible "
                "server with its api_base, or hosted_vllm/NAME for vLLM"
            )
        return model

    @field_validator("api_key")
    @classmethod
    def _reference(cls, key: str | None) -> str | None:
        if key is not None and (not key.startswith(_REFERENCE) or key == _REFERENCE):
            raise ValueError(
                "holds a key itself, and secrets may not stand in settings: put the key into a variable and write "
                "api_key: os.environ/NAME_OF_THE_VARIABLE, or leave api_key out where none is needed"
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
            raise ValueError("must be a plain URL, without user, password or query; a key belongs into api_key")
        return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"

    @model_validator(mode="after")
    def _says_where(self) -> LitellmParams:
        if self.api_base is None and self.kind == "vllm":
            raise ValueError(
                f"{self.model} needs api_base: the URL where that vLLM answers, such as http://host:8001/v1"
            )
        return self

    @property
    def kind(self) -> Literal["openai", "vllm"]:
        """What the server understands: OpenAI's fields alone, or vLLM's too."""
        return _PROVIDERS[self.model.partition("/")[0]] if "/" in self.model else "openai"

    @property
    def served_name(self) -> str:
        """The name that the server knows the model by."""
        return self.model.partition("/")[2] if "/" in self.model else self.model

    @property
    def base(self) -> str:
        """The URL before `/chat/completions`."""
        return self.api_base or _OPENAI

    @property
    def variable(self) -> str | None:
        """The name of the variable that holds the key."""
        return self.api_key.removeprefix(_REFERENCE) if self.api_key else None


class ModelEntry(BaseModel):
    """One entry of `model_list`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    model_name: str = Field(min_length=1, max_length=100, pattern=r"^[^@*\s]+$")
    litellm_params: LitellmParams
    model_info: dict[str, Any] = Field(default_factory=dict)  # the user's own notes, such as prices


def keys_in(environ: Mapping[str, str], entries: Iterable[ModelEntry]) -> dict[str, SecretStr]:
    """Return the keys that the entries refer to, by variable, as far as the variables are set."""
    variables = [entry.litellm_params.variable for entry in entries]
    return {name: SecretStr(environ[name]) for name in variables if name and environ.get(name)}


def key_of(entry: ModelEntry, keys: Mapping[str, SecretStr]) -> SecretStr | None:
    """Return an entry's key; None where it needs none. Raises StartError where its variable is not set."""
    variable = entry.litellm_params.variable
    if variable is not None and variable not in keys:
        raise StartError(
            f"model_list: {entry.model_name} takes its api_key from the variable {variable}, which is not set: "
            "set it where the proxy is started"
        )
    return keys[variable] if variable else None
