"""Calls the endpoint with boto3 in its soak, and has each answer judged by an oracle."""

import json
import random
import re
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EventStreamError

from tests.nightly.bad_bucket import BadBucket
from tests.nightly.endpoint_oracle import Call, Oracle
from tests.nightly.endpoint_packages import DYING, HOSTILE, key_of, right_answer
from tests.trees import infer_body

if TYPE_CHECKING:
    from collections.abc import Callable

ACCESS_KEY = "AKIDSOAK"
SECRET = "the secret of the soak"  # noqa: S105 - of this test alone
MODEL_WAIT_SECONDS = 20
_ABSENT = "no-such-model.tar.gz"
# For how long callers may get the errors of a fault that has ended: some are remembered.
_AFTER_SECONDS = 20.0

_MAX_PAUSE_SECONDS = 1.0  # after an error that may be another one the next time
_GOOD_BODY = json.dumps(infer_body(1.0))

# What a 503 says where the store, Triton or the adapter, or too little room is the cause.
_OF_STORE = re.compile("^Failed to download")
_OF_TRITON = re.compile("adapter is (starting|stopping|draining)|adapter stopped|Triton")
_OF_ROOM = re.compile("all other models are in use|wait for model|no room on disk")
_ABSENT_WORDS = "Please ensure that there is an object of this key"


@dataclass
class Tally:
    """Counts what callers were answered. `objections` is what must never be."""

    answers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    objections: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def object(self, text: str) -> None:
        """Record something that must never be."""
        line = f"{time.strftime('%X')} {text}"
        sys.stdout.write(f"objection: {line}\n")
        sys.stdout.flush()
        with self.lock:
            self.objections.append(line)


@dataclass(frozen=True)
class Refused:
    """An error as boto3 has read it."""

    status: int
    code: str
    message: str
    original_status: int | None

    @property
    def is_busy(self) -> bool:
        """Return whether the same call may be answered a moment later."""
        return self.status in {429, 503}

    @property
    def pattern(self) -> str:
        """Return the message without what differs from call to call."""
        text = re.sub(r"(dying|hostile|team-\d|large)/[\w./-]+", "KEY", self.message)
        text = re.sub(r"request [0-9a-f-]{36}", "request ID", text)
        text = re.sub(r"\d+(\.\d+)?", "0", text)
        return f"{self.status} {self.code} {self.original_status}: {text[:260]}"


class Caller:
    """Calls models one after the other, with one client of boto3."""

    _making = threading.Lock()  # to make clients is not safe for threads

    def __init__(
        self,
        address: str,
        seed: int,
        *,
        models: int,  # how many good ones there are
        oracle: Oracle,
        bucket: BadBucket,
        tally: Tally,
    ) -> None:
        self._dice = random.Random(seed)
        self._models = models
        self._weights = [1 / (rank + 1) for rank in range(models)]
        self._oracle = oracle
        self._bucket = bucket
        self._tally = tally
        with self._making:
            self._client = self._client_of(address, SECRET)
            self._stranger = self._client_of(address, "another secret")

    def _client_of(self, address: str, secret: str) -> Any:
        return boto3.client(
            "sagemaker-runtime",
            endpoint_url=f"http://{address}",
            region_name="eu-west-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=secret,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=90),
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._stranger.close()

    def run(self, is_over: threading.Event) -> None:
        """Call one model after the other until it is over."""
        with closing(self):
            while not is_over.is_set():
                self._call_any()

    def _call_any(self) -> None:
        kinds: list[tuple[float, Callable[[], object]]] = [
            (0.80, self._call_some_model),
            (0.06, self._stream_some_model),
            (0.03, lambda: self.call_hostile(self._dice.choice(list(HOSTILE)))),
            (0.05, lambda: self._call_dying(self._dice.choice(DYING))),
            (0.02, self._call_absent),
            (0.02, self._call_as_stranger),
            (0.02, self._call_with_bad_body),
        ]
        [call] = self._dice.choices([call for _, call in kinds], [share for share, _ in kinds])
        call()

    # -- calls ------------------------------------------------------------------------------

    def _call_some_model(self) -> None:
        [number] = self._dice.choices(range(self._models), self._weights)
        self.call_model(number)

    def _stream_some_model(self) -> None:
        [number] = self._dice.choices(range(self._models), self._weights)
        self.call_model(number, is_stream=True)

    def call_model(self, number: int, *, is_stream: bool = False) -> int | None:
        """Call a good model; return the contents that the answer came from, None for an error."""
        value = float(self._dice.randrange(1000))
        body = json.dumps(infer_body(value))
        call = self._oracle.begin_call(key_of(number))
        answer = self._ask(call, body, is_stream=is_stream)
        if isinstance(answer, Refused):
            self._judge_refusal(call, answer)
            return None
        if isinstance(answer, BotoCoreError):
            self._judge_break(call, answer)
            return None
        contents = int(answer[2]) if len(answer) == 5 else -1
        is_known = contents in self._oracle.had(call.key)
        if not is_known or answer != right_answer(number, contents, value):
            self._object(call, f"wrong or mixed answer {answer} to {value}")
            return None
        if (fault := self._oracle.judge(call, contents)) is not None:
            self._object(call, fault)
        return contents

    def call_hostile(self, name: str) -> None:
        """Call a hostile archive, which must be refused."""
        self._call_in_vain(f"hostile/{name}", {"ValidationError", "ModelError"})

    def _call_dying(self, key: str) -> None:
        self._call_in_vain(key, {"ModelError"})

    def _call_absent(self) -> None:
        self._call_in_vain(_ABSENT, {"ValidationError"})

    def _call_as_stranger(self) -> None:
        self._call_in_vain(key_of(0), {"InvalidSignatureException"}, client=self._stranger)

    def _call_with_bad_body(self) -> None:
        self._call_in_vain(key_of(self._dice.randrange(3)), {"ModelError"}, body='{"inputs": [')

    def _call_in_vain(
        self, key: str, codes: set[str], *, body: str = _GOOD_BODY, client: Any = None
    ) -> None:
        """Make a call that cannot be answered; expect one of these codes, or that it is busy."""
        call = self._oracle.begin_call(key)
        answer = self._ask(call, body, client=client)
        if isinstance(answer, list):
            self._object(call, f"answered {answer}")
        elif isinstance(answer, BotoCoreError):
            self._judge_break(call, answer)
        elif answer.code not in codes:
            self._judge_refusal(call, answer)

    # -- one request ------------------------------------------------------------------------

    def _ask(
        self, call: Call, body: str, *, is_stream: bool = False, client: Any = None
    ) -> list[float] | Refused | BotoCoreError:
        """Return the numbers of the answer, or an error that came instead."""
        answer: list[float] | Refused | BotoCoreError
        try:
            if is_stream:
                answer = self._stream(call, body)
            else:
                answer = self._invoke(client or self._client, call, body)
        except (EventStreamError, ClientError) as error:
            answer = _refused(error)
        except BotoCoreError as error:  # the connection was refused, or it broke
            answer = error
        call.ended = time.monotonic()
        self._count(call, answer, is_stream=is_stream)
        if isinstance(answer, BotoCoreError) or (isinstance(answer, Refused) and answer.is_busy):
            time.sleep(self._dice.uniform(0, _MAX_PAUSE_SECONDS))
        return answer

    def _count(self, call: Call, answer: object, *, is_stream: bool) -> None:
        kind = f"200 {call.cache}{' stream' if is_stream else ''}"
        if isinstance(answer, Refused):
            kind = f"{answer.status} {answer.code}"
        elif isinstance(answer, BotoCoreError):
            kind = type(answer).__name__
        with self._tally.lock:
            self._tally.answers[kind] += 1
            self._tally.waits.append(call.ended - call.began)
            if isinstance(answer, Refused):
                self._tally.reasons[answer.pattern] += 1

    def _invoke(self, client: Any, call: Call, body: str) -> list[float]:
        answer = client.invoke_endpoint(
            EndpointName="soak", TargetModel=call.key, ContentType="application/json", Body=body
        )
        call.cache = _cache_of(answer)
        numbers: list[float] = json.loads(answer["Body"].read())["outputs"][0]["data"]
        return numbers

    def _stream(self, call: Call, body: str) -> list[float]:
        answer = self._client.invoke_endpoint_with_response_stream(
            EndpointName="soak", InferenceComponentName=call.key, Body=body
        )
        call.cache = _cache_of(answer)
        [event] = list(answer["Body"])
        numbers: list[float] = json.loads(event["PayloadPart"]["Bytes"])["outputs"][0]["data"]
        return numbers

    # -- what may be ------------------------------------------------------------------------

    def _object(self, call: Call, text: str) -> None:
        took = f"{call.ended - call.began:.2f} s, ended {time.strftime('%X')}"
        self._tally.object(f"{call.key}: {text} ({took})")

    def _judge_break(self, call: Call, error: BotoCoreError) -> None:
        """Object to a connection that ended while the adapter was neither killed nor stopped."""
        if not self._oracle.adapter_down.touch(call):
            self._object(call, repr(error))

    def _judge_refusal(self, call: Call, refused: Refused) -> None:
        """Object to an error that nothing explains."""
        is_explained = {
            "ServiceUnavailable": self._can_be_unavailable,
            "ModelNotReadyException": self._can_be_late,
            "ValidationError": self._can_be_invalid,
            "ModelError": self._is_of_kill,
            "ModelStreamError": self._is_of_kill,
        }.get(refused.code)
        if is_explained is None or not is_explained(call, refused):
            self._object(call, str(refused))

    def _can_be_unavailable(self, call: Call, refused: Refused) -> bool:
        """Return whether the store, Triton, the adapter or too little room explains it."""
        oracle = self._oracle
        if _OF_ROOM.search(refused.message):
            return True
        if _OF_STORE.search(refused.message):
            return oracle.storms.touch(call, _AFTER_SECONDS) or (
                oracle.outages.touch(call, _AFTER_SECONDS)
            )
        return _OF_TRITON.search(refused.message) is not None and self._is_of_kill(call, refused)

    def _can_be_late(self, call: Call, refused: Refused) -> bool:
        has_waited = call.ended - call.began > MODEL_WAIT_SECONDS - 1
        return has_waited and "is not ready yet" in refused.message

    def _can_be_invalid(self, call: Call, refused: Refused) -> bool:
        if "there is no such key" in refused.message or _ABSENT_WORDS in refused.message:
            return self._oracle.was_deleted(call, _AFTER_SECONDS)
        return self._bucket.garbled[call.key] > 1

    def _is_of_kill(self, call: Call, _: Refused) -> bool:
        oracle = self._oracle
        return oracle.triton_down.touch(call, _AFTER_SECONDS) or (
            oracle.adapter_down.touch(call, _AFTER_SECONDS)
        )


def _refused(error: ClientError) -> Refused:
    response = error.response
    return Refused(
        response.get("ResponseMetadata", {}).get("HTTPStatusCode", 200),
        response["Error"]["Code"],
        response.get("OriginalMessage") or response["Error"].get("Message", ""),
        response.get("OriginalStatusCode"),
    )


def _cache_of(answer: Any) -> str:
    cache: str = answer["ResponseMetadata"]["HTTPHeaders"]["x-triton-adapter-cache"]
    return cache
