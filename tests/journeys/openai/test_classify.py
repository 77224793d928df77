"""POST /v1/classify at the models of a store."""

import pytest

from tests.running import Client

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("count", [3, 11])
def test_classes_have_labels_of_package(client: Client, count):
    """Ask with more texts than one inference takes, and with a colon in a label."""
    texts = [" ".join("word" for _ in range(number)) for number in range(1, count + 1)]
    for _ in range(2):
        reply = client.post("/v1/classify", {"model": "moods", "input": texts})
        assert reply.status == 200, reply.body
        body = reply.json()
        labels = [("calm", "glad", "so: so")[number % 3] for number in range(1, count + 1)]
        assert [item["label"] for item in body["data"]] == labels
        assert [item["index"] for item in body["data"]] == list(range(count))
        assert body["data"][0] == {
            "index": 0,
            "label": "glad",
            "probs": [0.25, 0.5, 0.25],
            "num_classes": 3,
        }
        assert (body["object"], body["model"]) == ("list", "moods")


def test_label_outside_utf8_gets_replacement_character(client: Client):
    """Triton puts the bytes of the file into its JSON as they are."""
    for _ in range(2):
        reply = client.post("/v1/classify", {"model": "latin", "input": ["one", "one two"]})
        assert reply.status == 200, reply.body
        assert [item["label"] for item in reply.json()["data"]] == [
            "caf\N{REPLACEMENT CHARACTER}",
            "sad",
        ]


def test_class_without_labels_has_none(client: Client):
    reply = client.post("/v1/classify", {"model": "numbers", "input": ["one", "one two"]})
    items = reply.json()["data"]
    assert [item["label"] for item in items] == [None, None]
    assert [item["probs"] for item in items] == [
        [0.25, 0.5, 0.25],
        [0.25, 0.25, 0.5],
    ]


def test_unsupported_fields_are_refused_by_name(client: Client):
    for field in ("use_activation", "truncate_prompt_tokens", "priority"):
        reply = client.post("/v1/classify", {"model": "moods", "input": "a", field: 7})
        assert (reply.status, field in reply.json()["error"]["message"]) == (400, True)


def test_model_without_texts_is_refused_with_its_tensors(client: Client):
    for path in ("/v1/classify", "/v1/embeddings"):
        reply = client.post(path, {"model": "text", "input": "a"})
        assert reply.status == 400
        assert "0 outputs of TYPE_FP32" in reply.json()["error"]["message"]
