"""The official Python client against `/v1`: every feature that cfq supports, and the errors.

Usage: python python_client.py URL KEY, in an environment with the package `openai`. The package parses each response into
its own types. `just openai-clients` prepares the environment and the server and runs it.
"""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Say hello."}]


class Answer(BaseModel):
    sure: bool


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def refused(error: type[openai.APIStatusError], call) -> openai.APIStatusError:
    try:
        call()
    except error as refusal:
        assert refusal.message, refusal
        return refusal
    raise AssertionError(f"no {error.__name__}")


def run(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    models = [model.id for model in client.models.list()]
    assert "alpha" in models, models
    name = next(model for model in models if model not in ("alpha", "beta"))
    assert client.models.retrieve(name).id == name

    create = client.chat.completions.create
    whole = create(model=name, messages=HELLO, max_tokens=20, seed=1)
    text, usage = whole.choices[0].message.content, whole.usage
    assert whole.id.startswith("chatcmpl-") and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = create(model="alpha", messages=HELLO, max_completion_tokens=20, seed=1)
    assert again.choices[0].message.content == text, (text, again)

    continued = client.completions.create(model=name, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=1)
    choice = continued.choices[0]
    assert "Paris" in choice.text and continued.object == "text_completion", continued
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.top_logprobs[0]) == 1, continued
    parts = client.completions.create(model=name, prompt="1, 2, 3,", max_tokens=8, temperature=0, stream=True)
    assert "4" in "".join(part.choices[0].text for part in parts)
    refused(openai.BadRequestError, lambda: client.completions.create(model=name, prompt=["a", "b"]))

    chunks = list(
        create(model=name, messages=HELLO, max_tokens=20, seed=1, stream=True, stream_options={"include_usage": True})
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text, (streamed, text)
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens, chunks[-1]

    parsed = client.chat.completions.parse(model=name, messages=HELLO, max_tokens=30, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer), parsed
    json_object = create(model=name, messages=HELLO, max_tokens=200, response_format={"type": "json_object"}, seed=2)
    if json_object.choices[0].finish_reason == "stop":
        json.loads(json_object.choices[0].message.content)
    called = create(model=name, messages=HELLO, max_tokens=40, tools=TOOLS, tool_choice="required")
    arguments = json.loads(called.choices[0].message.tool_calls[0].function.arguments)
    assert arguments["city"] in ("Bonn", "Rome"), called
    likely = create(model=name, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2)
    assert len(likely.choices[0].logprobs.content[0].top_logprobs) == 2, likely
    regex = create(model=name, messages=HELLO, extra_body={"structured_outputs": {"regex": "[ab]{3}"}})
    assert set(regex.choices[0].message.content) <= {"a", "b"}, regex
    stopped = create(model=name, messages=[{"role": "user", "content": "Count to 20."}], stop=["\n"], max_tokens=50)
    assert "\n" not in stopped.choices[0].message.content, stopped

    missing = refused(openai.NotFoundError, lambda: create(model="gpt-4o", messages=HELLO))
    assert missing.code == "model_not_found" and missing.param == "model", missing
    invalid = refused(openai.BadRequestError, lambda: create(model=name, messages=HELLO, temperature=3))
    assert invalid.param == "temperature", invalid
    long = [{"role": "user", "content": "word " * 30_000}]
    assert refused(openai.BadRequestError, lambda: create(model=name, messages=long)).code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=url, api_key="wrong-key-0123456789", max_retries=0)
    refused(openai.AuthenticationError, lambda: stranger.models.list())
    refused(openai.APIStatusError, lambda: client.embeddings.create(model=name, input="x"))


async def run_many(url: str, key: str) -> None:
    """Calls at the same time; one of them is given up."""
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)

    async def one(n: int) -> str:
        messages = [{"role": "user", "content": f"Write the number {n}."}]
        reply = await client.chat.completions.create(model="alpha", messages=messages, max_tokens=10)
        return reply.choices[0].finish_reason

    given_up = await client.chat.completions.create(model="alpha", messages=HELLO, max_tokens=2000, stream=True)
    async for _ in given_up:
        await given_up.close()
        break
    reasons = await asyncio.gather(*(one(n) for n in range(16)))
    assert set(reasons) <= {"stop", "length"}, reasons


if __name__ == "__main__":
    run(*sys.argv[1:3])
    asyncio.run(run_many(*sys.argv[1:3]))
    print(f"python: openai {openai.__version__}: ok")
