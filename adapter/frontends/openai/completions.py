"""Completes a text by Triton's generate extension, whole or as server-sent events.

The prompt goes to the model's input `text_input`, or to its only one of TYPE_STRING, and each
answer of the model has the next piece of the text. What else the caller says goes along under its
own name: Triton gives it to the input of that name, or to the model as a parameter.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from uuid import uuid4

from adapter.codecs.base import MAX_TEXT_BYTES
from adapter.core.triton_errors import Faults
from adapter.errors import AdapterError, InferenceFailed
from adapter.frontends.http.answers import Answer, answer_json
from adapter.frontends.http.handled_inference import HandledInference, iterate_generated
from adapter.frontends.http.instrumentation import FORWARDED_IDS, forwarded
from adapter.frontends.openai.errors import refusal_of
from adapter.frontends.openai.text_models import find_tensor
from adapter.runtime import clock
from adapter.telemetry.traffic import leave_out

_READ_HERE = frozenset({"model", "prompt", "stream_options", "user"})
_STRING = "TYPE_STRING"
# Triton does not count tokens
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


async def complete(
    handled: HandledInference,
    body: Mapping[str, Any],
    text: str,
    config: Mapping[str, Any],  # of the model
    faults: Faults,
) -> Answer | None:
    """Have the leased model complete a text, and answer."""
    leave_out()
    prompt = find_tensor(config, "input", _STRING, "text_input")["name"]
    output = find_tensor(config, "output", _STRING, "text_output")["name"]
    others = {name: body[name] for name in body.keys() - _READ_HERE}
    asked = json.dumps({**others, prompt: text}).encode()
    headers = forwarded(handled.request.headers, FORWARDED_IDS)
    about = {
        "id": f"cmpl-{uuid4().hex}",
        "object": "text_completion",
        "created": int(clock.wall()),
        "model": body["model"],
    }

    def describe(piece: str, reason: str | None = None) -> dict[str, Any]:
        """Return a text, or a piece of one, in OpenAI's form."""
        return {
            **about,
            "choices": [{"index": 0, "text": piece, "logprobs": None, "finish_reason": reason}],
        }

    async with handled.forward("/generate_stream", headers, asked) as answer:
        texts = _iterate_texts(iterate_generated(answer, handled.lease.record, faults), output)
        if body.get("stream") is True:
            await _write_events(handled, texts, describe)
            return None
        return answer_json(describe(await _read_whole(texts), "stop") | {"usage": USAGE})


async def _read_whole(texts: AsyncIterator[str]) -> str:
    """Return all pieces in one. Raises InferenceFailed when they are too long to be in memory."""
    whole = ""
    async for piece in texts:
        whole += piece
        if len(whole) > MAX_TEXT_BYTES:
            raise InferenceFailed(
                f"the completion has more than {MAX_TEXT_BYTES} characters, which only a call "
                'with "stream": true may have'
            )
    return whole


async def _write_events(
    handled: HandledInference,
    texts: AsyncIterator[str],
    describe: Callable[..., object],  # returns a piece of text as an answer
) -> None:
    """Write each piece as an event. A failure behind the first piece is the last event; one before
    it is raised, as nothing was written yet.
    """
    text: str | None = await anext(texts, "")
    writer = handled.begin_answer({"Content-Type": "text/event-stream"})
    try:
        while text is not None:
            await writer.write(_format_event(json.dumps(describe(text))))
            text = await anext(texts, None)
        await writer.write(
            _format_event(json.dumps(describe("", "stop"))) + _format_event("[DONE]")
        )
    except AdapterError as error:
        failure = await handled.fail_stream(error, {})
        await writer.write(_format_event(refusal_of(failure, handled.request.model_id).body))
    writer.end()


async def _iterate_texts(events: AsyncIterator[bytes], output: str) -> AsyncIterator[str]:
    """Yield the pieces of a text that events of Triton have."""
    async for event in events:
        # Triton has the bytes of the model in its JSON, of whatever encoding they are
        piece = json.loads(event.removeprefix(b"data:").decode(errors="replace"))
        yield str(piece.get(output, ""))


def _format_event(text: str) -> bytes:
    """Return a server-sent event."""
    return f"data: {text}\n\n".encode()
