"""OpenAI's own client against a real server: every answer is generate()'s of that adapter alone."""

from __future__ import annotations

import asyncio

import openai
import pytest
from server_bed import BASE, answer, chat_prompt, encode, tokenizer, tokens

SOURCES = {BASE: None, "a": 1, "b": 2, "c": 3}


def test_models_are_the_base_and_its_adapters(server):
    models = {model.id: model for model in server.client().models.list()}
    assert set(models) >= set(SOURCES)
    assert models[BASE].parent is None and models["a"].parent == BASE
    assert server.client().models.retrieve("b").id == "b"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("nobody")


def test_sources_are_told_apart():
    assert len({answer("Who?", number) for number in SOURCES.values()}) == len(SOURCES)


def test_completions_of_base_and_three_adapters_at_once(server):
    async def all_at_once():
        client = server.asynchronous()
        return await asyncio.gather(
            *(client.completions.create(model=m, prompt="Who?", max_tokens=12, temperature=0) for m in SOURCES)
        )

    for (model, number), made in zip(SOURCES.items(), asyncio.run(all_at_once()), strict=True):
        assert made.choices[0].text == answer("Who?", number), model
        assert made.model == model and made.object == "text_completion"


def test_chat_and_its_usage(server):
    made = server.client().chat.completions.create(
        model="a", messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=9, temperature=0
    )
    prompt, new = encode(chat_prompt("Hello")), tokens(tuple(encode(chat_prompt("Hello"))), 1, 9)
    assert made.choices[0].message.content == tokenizer().decode(new, skip_special_tokens=True)
    assert made.choices[0].message.role == "assistant"
    assert made.usage.prompt_tokens == len(prompt) and made.usage.completion_tokens == len(new)
    assert made.usage.total_tokens == len(prompt) + len(new)


def test_content_may_come_in_parts_and_from_a_developer(server):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    whole, parted = (
        server.client().chat.completions.create(
            model="b", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
        )
        for content in ("Hello", parts)
    )
    assert whole.choices[0].message.content == parted.choices[0].message.content
    server.client().chat.completions.create(
        model="b",
        messages=[{"role": "developer", "content": "Be kind"}, {"role": "user", "content": "x"}],
        max_tokens=1,
    )


@pytest.mark.parametrize("model", SOURCES)
def test_a_stream_is_the_whole_in_pieces(server, model):
    client = server.client()
    chunks = list(
        client.completions.create(
            model=model,
            prompt="Who?",
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == answer("Who?", SOURCES[model], 24)
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] in ("stop", "length")
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(tokens(tuple(encode("Who?")), SOURCES[model], 24))
    assert len({c.id for c in chunks}) == 1


def test_a_chat_stream_begins_with_the_role(server):
    stream = server.client().chat.completions.create(
        model="c", messages=[{"role": "user", "content": "Hi"}], max_tokens=10, temperature=0, stream=True, n=2
    )
    chunks = [chunk.choices[0] for chunk in stream]
    want = tokenizer().decode(tokens(tuple(encode(chat_prompt("Hi"))), 3, 10), skip_special_tokens=True)
    for index in (0, 1):
        mine = [choice for choice in chunks if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == want
        assert mine[-1].finish_reason in ("stop", "length")


def test_several_answers_and_several_prompts(server):
    made = server.client().completions.create(model="a", prompt=["One", "Two"], n=2, max_tokens=6, temperature=0)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert [c.text for c in made.choices] == [answer("One", 1, 6)] * 2 + [answer("Two", 1, 6)] * 2
    sampled = server.client().completions.create(model="a", prompt="One", n=8, max_tokens=16, temperature=1.5)
    assert len({choice.text for choice in sampled.choices}) > 1


def test_prompts_of_token_ids(server):
    client, ids = server.client(), encode("Who?")
    one = client.completions.create(model="b", prompt=ids, max_tokens=12, temperature=0)
    two = client.completions.create(model="b", prompt=[ids, encode("One")], max_tokens=12, temperature=0)
    assert one.choices[0].text == two.choices[0].text == answer("Who?", 2)
    assert two.choices[1].text == answer("One", 2)


def test_top_p_and_top_k_of_almost_nothing_are_greedy(server):
    for options in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}):
        assert server.ask("a", "Who?", **{**options}) == answer("Who?", 1)
        made = server.client().completions.create(model="a", prompt="Who?", max_tokens=12, temperature=1.7, **options)
        assert made.choices[0].text == answer("Who?", 1)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_and_cancel(server, stream):
    whole = answer("Tell", 1, 60)
    stop = whole[5:8]
    before = server.traffic()["a"].cancelled
    made = server.client().completions.create(
        model="a", prompt="Tell", max_tokens=60, temperature=0, stop=["never said", stop], stream=stream
    )
    chunks = list(made) if stream else [made]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    if not stream:
        assert made.usage.completion_tokens < 60
    from server_bed import until

    until(lambda: server.traffic()["a"].cancelled > before)
    until(server.idle)


def test_length_and_end_token_are_told_apart(server):
    reasons = set()
    for i in range(40):
        prompt = f"Prompt {i}"
        new = tokens(tuple(encode(prompt)), None, 40)
        made = server.client().completions.create(model=BASE, prompt=prompt, max_tokens=40, temperature=0)
        ended = new[-1] == tokenizer().eos_token_id
        assert made.choices[0].finish_reason == ("stop" if ended else "length")
        assert made.usage.completion_tokens == len(new)
        reasons.add(made.choices[0].finish_reason)
        if len(reasons) == 2:
            break
    assert reasons == {"stop", "length"}
