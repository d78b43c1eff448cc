"""Errors in the shape that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from ..errors import (
    AdapterExistsError,
    AdapterFormatError,
    AdapterNotFoundError,
    ConfigError,
    MultiLoraError,
    RoutingError,
    SlotError,
    UnsupportedAdapterError,
)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status; 4xx: the request is at fault, 5xx: the server is.
        message: what is wrong, where, and the next step.
        code: for programs.
        param: the field of the request that is at fault.
        retry_after: seconds after which the same request may work.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        # What a client sent may hold halves of characters, which cannot be encoded.
        message = self.message.encode("utf-8", "replace").decode("utf-8")
        param = None if self.param is None else self.param.encode("utf-8", "replace").decode("utf-8")
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        extra = dict(headers or {})
        if self.retry_after:
            extra["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            extra["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, extra)


def unavailable(why: str) -> ApiError:
    """503: nothing is wrong with the request; another replica, or this server later, may answer it."""
    return ApiError(503, why, "unavailable", retry_after=1)


def of_adapter(error: Exception, param: str = "model") -> ApiError:
    """What an error of loading or naming an adapter means to a client."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, AdapterNotFoundError):
        return ApiError(404, message, "model_not_found", param)
    if isinstance(error, AdapterExistsError):
        return ApiError(400, message, "adapter_exists", param)
    if isinstance(error, (AdapterFormatError, UnsupportedAdapterError, ConfigError, RoutingError)):
        return ApiError(400, message, "adapter_refused", param)
    if isinstance(error, SlotError):
        return ApiError(400, message, "no_room", param)
    if isinstance(error, MultiLoraError):
        return ApiError(500, message, "adapter_error", param)
    return ApiError(
        500, f"{type(error).__name__} while loading an adapter: see the server's log.", "adapter_error", param
    )
