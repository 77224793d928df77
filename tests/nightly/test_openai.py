"""OpenAI's client, LiteLLM and LangChain against a hundred embedders with memory for ten.

Their environment is made of the package registry the first time, and kept in pytest's cache.
"""

import json
import re
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.journeys.openai.models import read_vector, vector_of, write_completer, write_embedder
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1200)]

CLIENTS = ("openai", "litellm", "langchain-openai")
MODELS = 100
FIT = 10
CALLERS = 20
MEMORY = 'parameters { key: "memory_bytes" value { string_value: "100MiB" } }'

# Each caller asks for vectors until the time is over, of models by Zipf's law, with one client or
# the other, and prints what it was told.
CALLS = """
import json, random, sys, threading, time
import litellm, openai

base, callers, models, seconds, seed = sys.argv[1], *map(int, sys.argv[2:])
end = time.monotonic() + seconds
weights = [1 / rank for rank in range(1, models + 1)]
lock = threading.Lock()
client = openai.OpenAI(base_url=base, api_key="none", max_retries=20, timeout=300)

def by_openai(model, texts, encoding):
    extra = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model=model, input=texts, **extra)
    return [item.embedding for item in answer.data]

def by_litellm(model, texts, encoding):
    answer = litellm.embedding(
        model=f"openai/{model}", input=texts, api_base=base, api_key="none", max_retries=20,
        timeout=300,
    )
    return [item["embedding"] for item in answer.data]

def run(number):
    chance = random.Random(seed * 1000 + number)
    call = by_litellm if number % 2 else by_openai
    while time.monotonic() < end:
        [rank] = chance.choices(range(models), weights)
        texts = [f"text {chance.random()}" for _ in range(chance.choice([1, 1, 3, 20]))]
        encoding = chance.choice([None, "float", "base64"])
        told = {"client": call.__name__, "model": f"e{rank}", "texts": texts}
        try:
            told["vectors"] = call(told["model"], texts, encoding)
        except Exception as error:
            told["error"] = repr(error)
        with lock:
            print(json.dumps(told), flush=True)

threads = [threading.Thread(target=run, args=(number,)) for number in range(callers)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

ONCE = """
import asyncio, json, sys
import langchain_openai, litellm, openai

base = sys.argv[1]
client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
told = {"models": sorted(model.id for model in client.models.list())}
told["where"] = client.models.retrieve("e0").where
try:
    client.embeddings.create(model="nobody", input="a text")
except openai.NotFoundError as error:
    told["code"] = error.code
stream = client.completions.create(model="words", prompt="one two", stream=True)
told["stream"] = [piece.choices[0].text for piece in stream]
told["text"] = client.completions.create(model="words", prompt="one two").choices[0].text
whole = litellm.text_completion(
    model="text-completion-openai/words", prompt="one two", api_base=base, api_key="none"
)
told["litellm"] = whole.choices[0].text
client_of_langchain = {"base_url": base, "api_key": "none"}
told["langchain"] = langchain_openai.OpenAI(model="words", **client_of_langchain).invoke("one two")
embedder = langchain_openai.OpenAIEmbeddings(
    model="e0", check_embedding_ctx_length=False, **client_of_langchain
)
texts = [f"text {number}" for number in range(50)]
at_once = openai.AsyncOpenAI(base_url=base, api_key="none")

async def embed(text):
    return (await at_once.embeddings.create(model="e0", input=text)).data[0].embedding

async def embed_all():
    return await asyncio.gather(*map(embed, texts))

told["same vectors"] = embedder.embed_documents(texts) == asyncio.run(embed_all())
try:
    client.chat.completions.create(model="words", messages=[{"role": "user", "content": "a"}])
except openai.BadRequestError as error:
    told["chat"] = error.message
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment with the clients."""
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("-".join(["clients", *CLIENTS])))
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        command = [folder / "bin" / "python", "-m", "pip", "install", "-q", *CLIENTS]
        subprocess.run(command, check=True)
        (folder / "made").touch()
    return folder / "bin" / "python"


def run(python: Path, code: str, adapter: RunningAdapter, *arguments: object) -> list[dict]:
    """Run a program of the clients, and return the lines that it prints."""
    told = subprocess.run(
        [python, "-c", code, f"http://{adapter.http}/v1", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]


def count(adapter: RunningAdapter, metric: str) -> float:
    """The sum of all series of a metric that begin so."""
    with closing(Client(adapter.admin)) as client:
        page = client.get("/metrics").body.decode()
    return sum(map(float, re.findall(rf"^{re.escape(metric)}.* (\S+)$", page, re.MULTILINE)))


def test_hundred_embedders_answer_right_with_memory_for_ten(
    python: Path, tmp_path: Path, seconds: float, seed: int
):
    store = tmp_path / "store"
    for number in range(MODELS):
        write_embedder(store / f"e{number}", salt=f"e{number}", more=MEMORY)
    flags = (
        f"--model-store={store}",
        f"--cache-dir={tmp_path / 'cache'}",
        "--on-demand",
        "--memory-source=off",
        f"--memory-limit={FIT * 100 + 50}MiB",
    )
    with embedded_adapter(*flags, COMPLETE) as adapter:
        calls = run(python, CALLS, adapter, CALLERS, MODELS, int(seconds), seed)
        cold = count(adapter, 'triton_adapter_endpoint_requests_total{cache="miss"') + count(
            adapter, 'triton_adapter_endpoint_requests_total{cache="disk"'
        )
        evictions = count(adapter, 'triton_adapter_endpoint_evictions_total{from="memory"')

    failed = [call for call in calls if "error" in call]
    wrong = [
        call
        for call in calls
        if [read_vector(vector) for vector in call.get("vectors", ())]
        != [vector_of(call["model"], text) for text in call["texts"]]
    ]
    clients = {call["client"] for call in calls}
    figures = f"{len(calls)} calls, {len(failed)} failed, {cold:.0f} cold, {evictions:.0f} evicted"
    print(figures)  # noqa: T201 - the figures of the run
    assert (failed, wrong, clients) == ([], [], {"by_openai", "by_litellm"})
    assert len({call["model"] for call in calls}) > FIT
    assert cold > FIT
    assert evictions > 0


def test_clients_read_models_errors_and_completions(python: Path, tmp_path: Path):
    store = tmp_path / "store"
    write_embedder(store / "e0", salt="e0")
    write_completer(store / "words")
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path / 'cache'}", "--on-demand")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        [told] = run(python, ONCE, adapter)

    assert "chat template" in told.pop("chat")
    assert told == {
        "models": ["e0", "words"],
        "where": "store",
        "code": "model_not_found",
        "stream": ["ONE ", "TWO ", ""],
        "text": "ONE TWO ",
        "litellm": "ONE TWO ",
        "langchain": "ONE TWO ",
        "same vectors": True,
    }


def test_small_embedding_takes_little_more_cpu_than_v2(tmp_path: Path):
    """Compare the CPU of the event loop, without that of Triton, in turns on a kept connection."""
    store = tmp_path / "store"
    write_embedder(store / "e0", salt="e0")
    text = "a text of a usual length for a query, as those who search write it"
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    embedding = {"model": "e0", "input": text}
    calls = {
        "v2": ("/v2/models/e0/infer", {"inputs": [tensor]}),
        "float": ("/v1/embeddings", embedding),
        "base64": ("/v1/embeddings", {**embedding, "encoding_format": "base64"}),
    }
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path / 'cache'}", "--on-demand")
    with embedded_adapter(*flags, COMPLETE) as adapter, closing(adapter.client()) as client:
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(25):
            for name, (path, body) in calls.items():
                started_at = read_cpu_seconds(adapter)
                for _ in range(100):
                    assert client.post(path, body).status == 200
                seconds[name].append(read_cpu_seconds(adapter) - started_at)

    # the first turn loads the model
    medians = {name: statistics.median(turns[1:]) for name, turns in seconds.items()}
    print({name: f"{1e4 * median:.0f} us" for name, median in medians.items()})  # noqa: T201
    assert medians["float"] <= 1.5 * medians["v2"]
    assert medians["base64"] <= 1.5 * medians["v2"]


def read_cpu_seconds(adapter: RunningAdapter) -> float:
    """The time that the main thread of the adapter has run."""
    return int(Path(f"/proc/{adapter.process.pid}/schedstat").read_text().split()[0]) / 1e9
