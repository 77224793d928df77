"""What an editor accepts in a file of settings, the adapter accepts as well."""

import pytest
import yaml

from adapter.errors import InvalidSettings
from adapter.settings import file_schema, load_settings


def load(folder, text):
    file = folder / "adapter.yaml"
    file.write_text(text)
    load_settings({}, {}, file)


@pytest.mark.parametrize(
    "text",
    [
        "http: off",
        "memory_limit: 8GiB",
        "memory_limit: 8000000",
        "memory_reserve: 10%",
        "inline_files: off",
        "triton_args: [--log-verbose=1]",
        "triton: embedded\nmodel_roots: /a:/b",
        "modelmesh_model_concurrency: instances",
        "endpoints: {prod: {models: /models}}",
        "endpoints: [prod=/models]",
    ],
)
def test_what_file_may_say_is_in_schema(tmp_path, text):
    import jsonschema  # here, as it costs each process of tests seconds

    load(tmp_path, text)
    jsonschema.validate(yaml.safe_load(text), file_schema())


@pytest.mark.parametrize(
    "text", ["memory_limits: 8GiB", "triton: near", "load_concurrency: 0", "control_token: abc"]
)
def test_schema_lacks_what_files_may_not_say(tmp_path, text):
    import jsonschema

    with pytest.raises(InvalidSettings):
        load(tmp_path, text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), file_schema())


def test_it_is_schema_and_defaults_keep_to_it():
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(file_schema())
    given = {n: each["default"] for n, each in file_schema()["properties"].items()}
    jsonschema.validate(given, file_schema())
