"""The operator API's error responses for unknown routes, wrong methods and invalid parameters.

A method that the path does not support is 405, with the supported ones in `allow`; OPTIONS returns these too. Invalid
parameters and bodies are 422; the message names the field and the expected form, and repeats no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ratchet.proxy.errors import BadRequest, NotFound, ProxyError, method_not_allowed, to_openai_error
from ratchet.store.errors import InvalidTransition, RecordNotFound, StoreError, StoreUnavailable

_STATUS: dict[type[StoreError], int] = {RecordNotFound: 404, InvalidTransition: 409, StoreUnavailable: 503}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error response of the operator API."""

    error: ErrorDetail


def status_of(error: Exception) -> int:
    """Return the status of the response to an error."""
    if isinstance(error, StoreError):
        return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    if isinstance(error, RequestValidationError):
        return 422
    if isinstance(error, ProxyError):
        return error.status
    return error.status_code if isinstance(error, HTTPException) else 500


def add_error_handlers(api: FastAPI) -> None:
    """Add the handlers to an application."""

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, refused: HTTPException) -> Response:
        methods = _methods(request)
        allow = {"allow": ", ".join([*methods, "OPTIONS"])} if methods else {}
        if methods and request.method == "OPTIONS":
            return Response(None, 204, allow)
        error = _error(request, refused, allow.get("allow"))
        return Response(to_openai_error(error), refused.status_code, allow, media_type="application/json")

    @api.exception_handler(RequestValidationError)
    async def on_invalid_request(request: Request, error: RequestValidationError) -> Response:
        return Response(to_openai_error(_validation_error(error)), status_of(error), media_type="application/json")


def _validation_error(error: RequestValidationError) -> BadRequest:
    """Return the first error; FastAPI's own message contains the whole body."""
    errors = error.errors()
    first = errors[0]
    where, *path = first["loc"]
    if first["type"] == "json_invalid":
        return BadRequest(f"{where}: the body is not JSON: {first['ctx']['error']}", code="unprocessable")
    if where == "body":
        field, reason = ".".join(map(str, path)), first["msg"]
    else:  # after its name: the member of a list, or the type of several that it may have
        field, reason = str(path[0]), _allowed(errors, first["loc"][:2]) or first["msg"]
    return BadRequest(f"{field or where}: {reason}", param=field or None, code="unprocessable")


def _allowed(errors: Sequence[Any], parameter: tuple[str, ...]) -> str | None:
    """Return the values that a parameter may have, of each of its types; None if one takes more than some values."""
    expected = [one.get("ctx", {}).get("expected") for one in errors if one["loc"][:2] == parameter]
    if len(expected) < 2 or not all(expected):
        return None
    values = dict.fromkeys(", ".join(expected).replace(" or ", ", ").split(", "))
    *others, last = values
    return f"Input should be {', '.join(others)} or {last}"


def _methods(request: Request) -> list[str]:
    """Return the methods of the routes that match this path."""
    found = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in found for method in getattr(route, "methods", None) or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _error(request: Request, refused: HTTPException, allow: str | None) -> ProxyError:
    path = request.url.path[:200]
    if allow:
        return method_not_allowed(f"{path} takes {allow}, not {request.method}", allow)
    if refused.status_code == 404:
        return NotFound(f"no route {request.method} {path}; /api/openapi.json lists the routes", code="unknown_route")
    return ProxyError(str(refused.detail))
