"""Many clients at once, some of whom leave: nobody gets another's answer, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress

from server_bed import BASE, WAIT_S, answer, chat_prompt, until, write

CLIENTS, SECONDS, ADAPTERS, LONGEST = 30, 8.0, 6, 24
PROMPTS = ["Who?", "Tell me", "Ä ö ü", "x" * 90]


async def client(server, name: int, end: float, seen: list) -> None:
    """Asks until time is up, each request in one of four ways; some are left in the middle."""
    chance, made = random.Random(name), server.asynchronous()
    while time.monotonic() < end:
        number = chance.choice([None, *range(ADAPTERS)])
        model, prompt = BASE if number is None else f"n{number}", chance.choice(PROMPTS)
        new, chat, stream = chance.randint(1, LONGEST), chance.random() < 0.3, chance.random() < 0.5
        common = {"model": model, "max_tokens": new, "temperature": 0, "stream": stream, "n": chance.choice([1, 1, 2])}
        if chat:
            asked = made.chat.completions.create(messages=[{"role": "user", "content": prompt}], **common)
        else:
            asked = made.completions.create(prompt=prompt, **common)
        key = (chat_prompt(prompt) if chat else prompt, number, new)
        if chance.random() < 0.15:
            with suppress(asyncio.TimeoutError):
                got = await asyncio.wait_for(asked, chance.uniform(0.001, 0.1))
                if stream:
                    await got.close()
            seen.append(("left", key))
        elif not stream:
            got = await asyncio.wait_for(asked, WAIT_S)
            for choice in got.choices:
                seen.append((choice.message.content if chat else choice.text, key))
        else:
            texts = [""] * common["n"]
            leave = chance.random() < 0.2
            async for chunk in await asyncio.wait_for(asked, WAIT_S):
                for choice in chunk.choices:
                    texts[choice.index] += (choice.delta.content or "") if chat else choice.text
                if leave and any(texts):
                    break
            else:
                seen += [(text, key) for text in texts]
                continue
            seen.append(("left", key))
    await made.close()


def test_thirty_clients_of_mixed_adapters(serve, tmp_path):
    for number in range(ADAPTERS):
        write(tmp_path / f"n{number}", number)
    server = serve(adapters=tmp_path, allow_runtime_updates=True)
    seen: list[tuple[str, tuple[str, int | None, int]]] = []

    async def everybody():
        end = time.monotonic() + SECONDS
        await asyncio.wait_for(
            asyncio.gather(*(client(server, i, end, seen) for i in range(CLIENTS))), SECONDS + WAIT_S
        )

    asyncio.run(everybody())
    whole = [(text, key) for text, key in seen if text != "left"]
    wrong = [(text, key) for text, key in whole if text != answer(*key)]
    assert not wrong, f"{len(wrong)} of {len(whole)} are wrong: {wrong[:3]}"
    counts = Counter(key[1] for _, key in whole)
    assert len(counts) == ADAPTERS + 1 and len(whole) > 3 * CLIENTS and len(seen) > len(whole)

    until(server.idle)
    until(lambda: server.engine._manager.output_router.output_queue.empty())
    assert not server.engine._manager.output_router.result_handlers
    until(lambda: not server.engine._late)
    scheduler = server.engine._manager.batch_processor.scheduler
    assert not scheduler.active_requests and not scheduler.waiting_requests and not scheduler.waiting_requests_order
    assert all(adapter.in_use == 0 for adapter in server.engine.multilora.adapters.values())
    traffic = server.traffic().values()
    assert sum(t.requests for t in traffic) == sum(t.finished + t.cancelled for t in traffic)
    assert sum(t.failed for t in traffic) == 0 < sum(t.cancelled for t in traffic)
    assert server.ask("n1", "Who?") == answer("Who?", 1)
