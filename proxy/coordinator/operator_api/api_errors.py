"""What the operator API answers where no route takes a request, or not as it is, in the shape of all its errors.

A method that the path does not take is 405, with every method that it takes in `allow`; OPTIONS asks just for that.
Parameters and bodies of another form are 422, which names the field and what it has to be, and repeats no value.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ratchet.proxy.errors import BadRequest, NotFound, ProxyError, method_not_allowed, to_openai_error


class _Told(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """What every error of the operator API looks like."""

    error: _Told


def add_error_handlers(api: FastAPI) -> None:
    """Let an application answer so."""

    @api.exception_handler(HTTPException)
    async def refuse(request: Request, refused: HTTPException) -> Response:
        methods = _methods(request)
        allow = {"allow": ", ".join([*methods, "OPTIONS"])} if methods else {}
        if methods and request.method == "OPTIONS":
            return Response(None, 204, allow)
        error = _error(request, refused, allow.get("allow"))
        return Response(to_openai_error(error), refused.status_code, allow, media_type="application/json")

    @api.exception_handler(RequestValidationError)
    async def correct(request: Request, wrong: RequestValidationError) -> Response:
        return Response(to_openai_error(_misformed(wrong)), 422, media_type="application/json")


def _misformed(wrong: RequestValidationError) -> BadRequest:
    """Return what is wrong first; FastAPI's own words hold the whole body."""
    first = wrong.errors()[0]
    where, *path = first["loc"]
    field = ".".join(map(str, path)) if first["type"] != "json_invalid" else ""
    said = f"the body is not JSON: {first['ctx']['error']}" if first["type"] == "json_invalid" else first["msg"]
    return BadRequest(f"{field or where}: {said}", param=field or None, code="unprocessable")


def _methods(request: Request) -> list[str]:
    """Return the methods that routes of this path take."""
    found = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in found for method in getattr(route, "methods", None) or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _error(request: Request, refused: HTTPException, allow: str | None) -> ProxyError:
    path = request.url.path[:200]
    if allow:
        return method_not_allowed(f"{path} takes {allow}, not {request.method}", allow)
    if refused.status_code == 404:
        return NotFound(f"no route {request.method} {path}; there is a list in /api/openapi.json", code="unknown_route")
    return ProxyError(str(refused.detail))
