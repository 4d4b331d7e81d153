"""Masks secrets in printed or written text: passwords in store URLs, and values with secret-sounding names.

The values that processes receive are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

MASK = "***"
# TOKENIZERS_PARALLELISM is not secret.
_SECRET_VARIABLE = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Options are matched by whole words: --max-num-batched-tokens and --tokenizer are not secret.
_SECRET_OPTION = re.compile(r"--(?:[\w-]*[-_])?(?:token|key|secret|password)", re.IGNORECASE)
# Up to the last @: what may be part of a password is hidden rather than shown.
_USERINFO = re.compile(r"(://[^:/@]*:).*(?=@)")
_QUERY = re.compile(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)


def mask_store_url(url: str) -> str:
    """Return a store URL with its password hidden; without one it comes back as it is."""
    return _QUERY.sub(rf"\g<1>{MASK}", _USERINFO.sub(rf"\g<1>{MASK}", url))


def has_password(url: str) -> bool:
    """Return whether a store URL holds a password."""
    return mask_store_url(url) != url


def mask_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the values of secret ones hidden."""
    return {name: MASK if _SECRET_VARIABLE.search(name) else value for name, value in variables.items()}


def mask_arguments(arguments: Iterable[str]) -> Iterator[str]:
    """Yield a command's arguments with the values of secret options hidden: `--api-key X` and `--api-key=X`."""
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = _SECRET_OPTION.fullmatch(name) is not None
        if hide and not argument.startswith("--"):
            yield MASK
        else:
            yield f"{name}={MASK}" if is_secret and equals else argument
        hide = (is_secret and not equals) or (hide and not argument.startswith("--"))
