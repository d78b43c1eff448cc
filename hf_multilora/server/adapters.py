"""Endpoints that load, unload, reload and pin adapters, with vLLM's names and bodies where vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from ..errors import MultiLoraError
from .answers import Answers
from .problems import ApiError, of_adapter
from .protocol import AdapterAnswer, AdapterName, LoadAdapter, PinAdapter, ReloadAdapter


def router(answers: Answers) -> APIRouter:
    """The endpoints, for one engine; 403 unless the settings allow them."""
    routes, resolver, handle = APIRouter(prefix="/v1"), answers.resolver, answers.engine.multilora

    def allowed() -> None:
        if not answers.settings.allow_runtime_updates:
            raise ApiError(
                403,
                "Adapters cannot be changed at run time on this server: it was started without "
                "--allow-runtime-updates.",
                "runtime_updates_disabled",
            )

    async def registered(name: str) -> None:
        if not answers.engine.registered(name):
            raise await asyncio.to_thread(resolver.not_found, name, "lora_name")

    def said(report: Any, name: str, what: str) -> AdapterAnswer:
        message = f"Success: LoRA adapter '{name}' {what} successfully."
        return AdapterAnswer(
            id=name, message=message, generation=report.generation, rank=report.rank, warnings=report.warnings
        )

    async def done(work: Any, name: str) -> None:
        try:
            await asyncio.wait_for(work, answers.settings.request_timeout_s)
        except MultiLoraError as error:
            raise of_adapter(error, "lora_name") from error
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise ApiError(504, f"Requests still use {name!r}; it goes on once they have ended.", "timeout") from error

    @routes.post("/load_lora_adapter", response_model=AdapterAnswer)
    async def load(body: LoadAdapter) -> AdapterAnswer:
        """Register an adapter under a name of its own."""
        allowed()
        report = await resolver.load(body.lora_name, body.lora_path, body.load_inplace)
        return said(report, body.lora_name, "added")

    @routes.post("/reload_lora_adapter", response_model=AdapterAnswer)
    async def reload(body: ReloadAdapter) -> AdapterAnswer:
        """Read an adapter again, from where it came or from another place; requests in work end on the old weights."""
        allowed()
        await registered(body.lora_name)
        report = await resolver.load(body.lora_name, body.lora_path, True)
        return said(report, body.lora_name, "reloaded")

    @routes.post("/unload_lora_adapter", response_model=AdapterAnswer)
    async def unload(body: AdapterName) -> AdapterAnswer:
        """Forget an adapter; answers once requests that use it have ended."""
        allowed()
        await registered(body.lora_name)
        await done(resolver.unload(body.lora_name), body.lora_name)
        return AdapterAnswer(
            id=body.lora_name, message=f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        )

    @routes.post("/pin_lora_adapter", response_model=AdapterAnswer)
    async def pin(body: PinAdapter) -> AdapterAnswer:
        """Keep an adapter in a slot, or (pinned=false) let it be evicted again."""
        allowed()
        await registered(body.lora_name)
        await done(resolver.patiently(handle.pin if body.pinned else handle.unpin, body.lora_name), body.lora_name)
        word = "pinned" if body.pinned else "unpinned"
        return AdapterAnswer(
            id=body.lora_name, message=f"Success: LoRA adapter '{body.lora_name}' {word} successfully."
        )

    return routes
