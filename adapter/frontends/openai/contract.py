"""OpenAI's paths for models that come and go; docs/openai.md.

A call names its model in the body, which is read before the model is leased. The lease is V2's: it
waits for a model that is being loaded, and with `on_demand` has it loaded from the store.

`POST /v1/embeddings` on its way: `Service` of http/serve.py finds the handler of a request, and
writes its answer or refusal. `_embed_by_hand` answers where nothing but Triton has to be waited
for (http/by_hand.py). Otherwise `_serve`, in a task, reads the body, leases the model and has
`_embed` answer: `_infer` forwards an inference by the data plane (triton/http.py) for as many texts
as the model takes at once, and `_answer_embeddings` joins the rows of the answers.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from adapter.codecs.base import MAX_TEXT_BYTES, SLOW_BYTES, converted
from adapter.control.door import ModelRecord
from adapter.core.calls import V2Call
from adapter.core.model import parse_model_id
from adapter.core.triton_errors import Faults
from adapter.errors import InvalidRequest
from adapter.frontends.admin.store_models import ModelListing
from adapter.frontends.bodies import json_object
from adapter.frontends.http.answers import Answer, answer_json, write_large_answer
from adapter.frontends.http.by_hand import gather_body, infer_by_hand
from adapter.frontends.http.calls import model_of, refuse_compressed
from adapter.frontends.http.connection import Request
from adapter.frontends.http.handled_inference import HandledInference, Inferences
from adapter.frontends.http.instrumentation import FORWARDED_IDS, forwarded, quoted
from adapter.frontends.http.serve import ByHand, Handle
from adapter.frontends.openai.completions import complete
from adapter.frontends.openai.text_models import (
    TextModel,
    choose_output_parameter,
    read_rows,
    read_text_model,
    read_texts,
    write_inference,
)
from adapter.runtime import clock
from adapter.telemetry.traffic import waiting_for_caller

# Triton does not count tokens
_VECTORS = (
    '{"object": "list", "model": %s, "usage": {"prompt_tokens": 0, "total_tokens": 0}, "data": ['
)
_CLASSES = (
    '{"id": "classify-%s", "object": "list", "created": %d, "model": %s, '
    '"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, "data": ['
)
_CLASS = b'{"index": %d, "label": %b, "probs": %b, "num_classes": %d}'
# as Dynamo refuses them, and what no prompt of a completion can say
_REFUSED = (
    "add_special_tokens",
    "truncate_prompt_tokens",
    "use_activation",
    "priority",
    "echo",
    "logprobs",
    "suffix",
    "messages",
    "tools",
)
Body = Mapping[str, Any]
# Answers a call whose model is leased: with the inference, the call's body and its texts.
AnswerTexts = Callable[..., Awaitable[Answer | None]]


class OpenAI:
    """Answers the calls of OpenAI's API."""

    def __init__(self, inferences: Inferences, listing: ModelListing, faults: Faults) -> None:
        self._inferences = inferences
        self._listing = listing
        self._faults = faults
        self._max_body = min(inferences.max_body_bytes, MAX_TEXT_BYTES)
        # of loaded models, until these are unloaded; Triton is asked once for each
        self._models: WeakKeyDictionary[ModelRecord, TextModel] = WeakKeyDictionary()
        self._labels: WeakKeyDictionary[ModelRecord, Mapping[int, Any]] = WeakKeyDictionary()
        self.handlers: Mapping[str, Handle] = {
            "list": self._list,
            "get": self._get,
            "embeddings": ByHand(self._embed_by_hand, partial(self._serve, "input", self._embed)),
            "classify": partial(self._serve, "input", self._classify),
            "completions": partial(self._serve, "prompt", self._complete),
            "chat": _refuse_chat,
        }

    # -- models -----------------------------------------------------------------------------

    async def _list(self, _: Request) -> Answer:
        """Answer the list of models that may be called, loaded or not."""
        rows = await self._listing.list_callable()
        return answer_json({"object": "list", "data": [_describe_model(row) for row in rows]})

    async def _get(self, request: Request) -> Answer:
        """Answer what is known of one model."""
        return answer_json(_describe_model(await self._listing.show_callable(model_of(request))))

    # -- embeddings -------------------------------------------------------------------------

    async def _embed(self, handled: HandledInference, body: Body, texts: Sequence[str]) -> Answer:
        """Answer with a vector for each text."""
        _, rows = await self._infer_rows(handled, body, texts)
        return _answer_embeddings(handled.lease.record, rows)

    async def _embed_by_hand(self, request: Request) -> Answer | None:
        """Answer with a vector for each text. Return None for a call that needs a task: a large
        one, or one whose model, config or connection to Triton has to be waited for. Return None
        also once a large answer was written.
        """
        if not 0 < (request.content_length or 0) <= min(SLOW_BYTES, self._max_body):
            return None
        request.body = await gather_body(request)
        body, texts = _parse_call("input", request, request.body)
        lease = self._inferences.contracts.v2.find_lease(model_of(request))
        model = self._models.get(lease.record) if lease else None
        if not (lease and model) or len(texts) > (model.max_batch_size or 1):
            return None
        parameter = choose_output_parameter(model, body)
        headers, asked = _write_inference(request, model, texts, parameter)
        dataplane = request.connection.parts.dataplane
        path = f"/models/{lease.record.name}/infer"
        head = dataplane.compose_head(V2Call("POST", path, headers, asked))
        upstream = dataplane.take_idle()
        if upstream is None:
            return None
        read = partial(read_rows, model, len(texts))
        rows = await infer_by_hand(request, lease, upstream, head, asked, read=read)
        answer = _answer_embeddings(lease.record, rows)
        if len(answer.body) <= SLOW_BYTES:
            return answer
        await request.connection.delegate(write_large_answer(request, answer))
        return None

    # -- classes ----------------------------------------------------------------------------

    async def _classify(
        self, handled: HandledInference, body: Body, texts: Sequence[str]
    ) -> Answer:
        """Answer with the most probable class of each text, and with all probabilities."""
        model, rows = await self._infer_rows(handled, {}, texts)
        count = rows[0].count(b",") + 1
        labels = await self._find_labels(handled, model, texts[:1], count)
        size = sum(len(row) for row in rows)
        items = await converted(size, _describe_classes, rows, labels)
        begin = _CLASSES % (uuid4().hex, clock.wall(), quoted(body["model"]))
        return _answer_items(begin, items)

    async def _find_labels(
        self, handled: HandledInference, model: TextModel, texts: Sequence[str], count: int
    ) -> Mapping[int, Any]:
        """Return the labels of all classes. Triton is asked once, as it has no call for them but
        an inference, whose answer has VALUE:NUMBER:LABEL of each class.
        """
        record = handled.lease.record
        if record not in self._labels:
            body, _ = await _infer(handled, model, texts, f'"classification":{count}')
            entries = json.loads(body.decode(errors="replace"))["outputs"][0]["data"]
            classes = [entry.split(":", 2) for entry in entries]
            self._labels[record] = {
                int(number): "".join(label).rstrip("\r") or None for _, number, *label in classes
            }
        return self._labels[record]

    # -- completions ------------------------------------------------------------------------

    async def _complete(
        self, handled: HandledInference, body: Body, texts: Sequence[str]
    ) -> Answer | None:
        """Answer with the completion of a text."""
        if len(texts) > 1 or body.get("n", 1) != 1:
            raise InvalidRequest("more than one prompt, or n above 1, is not supported")
        config = await self._read_config(handled)
        return await complete(handled, body, texts[0], config, self._faults)

    # -- what all have in common ------------------------------------------------------------

    async def _serve(
        self,
        field: str,  # of the body, which has the texts
        answer_texts: AnswerTexts,
        request: Request,
    ) -> None:
        """Read a call, lease its model, and answer it."""
        # a body that was gathered by hand counts in the budget until the request is answered
        with nullcontext() if request.body else request.hold_body():
            raw = request.body
            if raw is None:
                with waiting_for_caller():
                    raw = await request.read_body(self._max_body)
            body, texts = await converted(len(raw), _parse_call, field, request, raw)
            answer_call = partial(answer_texts, body=body, texts=texts)
            answer = await self._inferences.attempt(
                self._inferences.contracts.v2, model_of(request), request, answer_call
            )
            if answer is not None:
                await write_large_answer(request, answer)

    async def _infer_rows(
        self, handled: HandledInference, body: Body, texts: Sequence[str]
    ) -> tuple[TextModel, list[bytes]]:
        """Return how the leased model takes texts, and the row of numbers of each text. As many
        texts go into one inference as the model takes.
        """
        record = handled.lease.record
        if record not in self._models:
            self._models[record] = read_text_model(await self._read_config(handled))
        model = self._models[record]
        parameter = choose_output_parameter(model, body)
        budget = handled.request.connection.parts.budget
        rows: list[bytes] = []
        step = model.max_batch_size or 1
        for at in range(0, len(texts), step):
            part = texts[at : at + step]
            answer, size = await _infer(handled, model, part, parameter)
            handled.held.enter_context(budget.hold_answer(len(answer)))
            rows += await converted(len(answer), read_rows, model, len(part), answer, size)
        return model, rows

    async def _read_config(self, handled: HandledInference) -> Body:
        """Return the config of a leased model as Triton has it."""
        call = V2Call("GET", f"/models/{handled.lease.record.name}/config", {})
        async with self._inferences.dataplane.forward(call, handled.lease) as answer:
            return json_object(await answer.read(), "the config of the model")


async def _refuse_chat(_: Request) -> Answer:
    """Refuse a chat."""
    raise InvalidRequest(
        "chats are not served: Triton knows neither chat templates nor tools. Send the whole "
        "prompt to /v1/completions"
    )


def _describe_model(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the listing as OpenAI's API describes a model, and where its files are."""
    return {
        "id": (*row["loaded_as"], row["name"])[0],
        "object": "model",
        "created": int(datetime.fromisoformat(row["modified"] or "1970-01-01T00Z").timestamp()),
        "owned_by": "triton-adapter",
        "where": row["where"],
        "state": row["state"],
    }


def _parse_call(field: str, request: Request, raw: bytes) -> tuple[Body, Sequence[str]]:
    """Return the JSON object of a call, without its nulls, which mean the same as no field, and
    the texts in a field of it; note the model that it names. Raises InvalidRequest.
    """
    refuse_compressed(request)
    parsed_body = json_object(raw, "the body")
    body = {name: value for name, value in parsed_body.items() if value is not None}
    name = body.get("model")
    if not isinstance(name, str):
        raise InvalidRequest("model must be a string")
    request.model_id = parse_model_id(name)
    for refused in _REFUSED:
        if body.get(refused):
            raise InvalidRequest(f"{refused} is not supported: see docs/openai.md")
    return body, read_texts(body.get(field), field)


def _answer_embeddings(record: ModelRecord, rows: Sequence[bytes]) -> Answer:
    """Return the answer to a call for embeddings, from vectors that are JSON already."""
    items = [
        b'{"object": "embedding", "index": %d, "embedding": %b}' % item for item in enumerate(rows)
    ]
    return _answer_items(_VECTORS % quoted(record.asked_for), items)


def _describe_classes(rows: Sequence[bytes], labels: Mapping[int, Any]) -> list[bytes]:
    """Return the class of each text as JSON, from probabilities that are JSON already."""
    items = []
    for index, row in enumerate(rows):
        numbers = json.loads(row)
        label = json.dumps(labels.get(numbers.index(max(numbers)))).encode()
        items.append(_CLASS % (index, label, row, len(numbers)))
    return items


def _answer_items(begin: str, items: Sequence[bytes]) -> Answer:
    """Return an answer that ends with a list of items."""
    body = begin.encode() + b", ".join(items) + b"]}\n"
    return Answer(body, {"Content-Type": "application/json"})


def _write_inference(
    request: Request, model: TextModel, texts: Sequence[str], parameter: str
) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of an inference for Triton."""
    body, json_bytes = write_inference(model, texts, parameter)
    headers = forwarded(request.headers, FORWARDED_IDS)
    return {**headers, "Inference-Header-Content-Length": str(json_bytes)}, body


async def _infer(
    handled: HandledInference, model: TextModel, texts: Sequence[str], parameter: str
) -> tuple[bytes, int | None]:
    """Send an inference to Triton; return its answer, and how much of that is JSON."""
    headers, body = _write_inference(handled.request, model, texts, parameter)
    async with handled.forward("/infer", headers, body) as answer:
        return await answer.read(), answer.json_header_bytes
