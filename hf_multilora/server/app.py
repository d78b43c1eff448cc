"""The app: endpoints, errors in OpenAI's shape, and the life of the engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from .._version import __version__
from . import adapters, openai, page, status
from .answers import Answers
from .clients import Keys
from .engine import Engine
from .gate import Gate
from .metrics import Metrics
from .problems import ApiError, unavailable
from .protocol import ErrorAnswer, now
from .resolve import Resolver
from .settings import Settings

logger = logging.getLogger(__name__)


def create_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """An app that answers from this engine. Its start starts the engine, its shutdown stops it.

    Raises:
        ConfigError: settings that cannot be honoured.
    """
    settings = settings or Settings()
    path = Path(str(engine.model.config._name_or_path))
    base = settings.served_name or (path.resolve() if path.is_dir() else path).name or "base"
    metrics = Metrics(engine, base, settings.max_metric_adapters)
    answers = Answers(engine, settings, Resolver(engine, settings, base), metrics)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            answers.max_len = min(engine.context, settings.max_model_len or engine.context)
            if settings.load_at_start:
                for message in await answers.resolver.load_folder():
                    logger.error("Not served: %s", message)
            yield
        finally:
            await engine.stop()

    app = FastAPI(
        title="hf_multilora",
        version=__version__,
        lifespan=life,
        docs_url=None,  # their pages fetch scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    app.state.answers = answers
    app.include_router(openai.router(answers, now()))
    app.include_router(adapters.router(answers))
    app.include_router(status.router(answers))
    app.include_router(page.router())
    _add_health(app, answers)
    _add_errors(app, metrics)
    keys, told = Keys(settings.api_keys), metrics.refused
    app.add_middleware(Gate, keys=keys, max_body_bytes=settings.max_body_bytes, told=told)
    return app


def _add_health(app: FastAPI, answers: Answers) -> None:
    engine = answers.engine

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether requests are answered: 503 while the server stops, and after the generation thread has died."""
        if (why := engine.why_not_ready()) is not None:
            raise unavailable(why)
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def metrics() -> Response:  # in a thread, for a load may hold the locks for a while
        """Prometheus' text format."""
        return Response(answers.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    def told(error: ApiError, headers: Any = None) -> JSONResponse:
        metrics.refused(error.status)
        return error.response(headers)

    @app.exception_handler(ApiError)
    async def of_api(request: Request, error: ApiError) -> JSONResponse:
        return told(error)

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return told(_explained(error))

    @app.exception_handler(UnicodeEncodeError)
    async def of_text(request: Request, error: UnicodeEncodeError) -> JSONResponse:
        return told(ApiError(400, "The request's text holds half of a character (a lone surrogate).", "invalid_text"))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}. See /openapi.json."
        return told(ApiError(error.status_code, message), error.headers)

    @app.exception_handler(Exception)
    async def of_bug(request: Request, error: Exception) -> JSONResponse:
        return told(ApiError(500, f"{type(error).__name__}: see the server's log.", "internal_error"))

    plain = app.openapi

    def described() -> dict[str, Any]:
        """Without FastAPI's own 422, which is a 400 here."""
        found = plain()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        return found

    app.openapi = described  # type: ignore[method-assign]


def _explained(error: RequestValidationError) -> ApiError:
    """The first of what is wrong with a request, and where."""
    found = error.errors()
    first = found[0]
    loc = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is no valid JSON: {first.get('ctx', {}).get('error', '')}.", "invalid_json")
    ctx = first.get("ctx", {})
    if first["type"] in ("unknown", "unsupported"):
        code = "unknown_field" if first["type"] == "unknown" else "unsupported_field"
        return ApiError(400, first["msg"], code, str(ctx.get("field")))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(loc)}: no such field.", "unknown_field", ".".join(loc))
    where = ".".join(loc) or "the body"
    message = first["msg"].removeprefix("Value error, ")
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    return ApiError(400, f"{where}: {message}.{more}".replace("..", "."), "invalid_value", loc[0] if loc else None)
