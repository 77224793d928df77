"""What the tests of leaving ModelMesh share: the controller's examples, and the program."""

import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from tests.buckets import KEYS, Bucket

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "examples" / "modelmesh" / "leave.py"
THEIRS = ROOT / "tests" / "data" / "modelmesh-serving"

Object = dict[str, Any]


def services() -> list[Object]:
    return list(yaml.safe_load_all((THEIRS / "example-isvcs.yaml").read_text()))


def service(name: str, kind: str, **model: Any) -> Object:
    [like, *_] = services()
    like["metadata"]["name"] = name
    like["spec"]["predictor"]["model"] = {"modelFormat": {"name": kind}, **model}
    return like


def keys(bucket: Bucket, prefix: str = "") -> dict[str, bytes]:
    """What is in the bucket, by key."""
    s3 = boto3.client(
        "s3",
        endpoint_url=bucket.endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    found = s3.list_objects_v2(Bucket=bucket.name, Prefix=prefix).get("Contents", [])
    return {
        each["Key"]: s3.get_object(Bucket=bucket.name, Key=each["Key"])["Body"].read()
        for each in found
    }


def arguments(bucket: Bucket, given: str, folder: Path, *flags: str) -> list[str]:
    (folder / "isvcs.json").write_text(given)
    always = ("--to", f"s3://{bucket.name}/by-name", "--bucket", f"localMinIO={bucket.name}")
    return [str(folder / "isvcs.json"), *always, *flags]


def variables(bucket: Bucket) -> dict[str, str]:
    return {**bucket.environ, "AWS_DEFAULT_REGION": "us-east-1"}


def run(bucket: Bucket, given: str, folder: Path, *flags: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the program with a file that has this. It is run in this
    process, which has imported boto3.
    """
    out, err = StringIO(), StringIO()
    with (
        pytest.MonkeyPatch.context() as changed,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        for name, text in variables(bucket).items():
            changed.setenv(name, text)
        changed.setattr(boto3, "DEFAULT_SESSION", None)
        changed.setattr(sys, "argv", [PROGRAM.name, *arguments(bucket, given, folder, *flags)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROGRAM), run_name="__main__")
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def leave(
    bucket: Bucket, services: list[Object], folder: Path, *flags: str
) -> tuple[int, list[str]]:
    """Exit code and lines of the program."""
    given = json.dumps({"kind": "List", "items": services})
    code, out, err = run(bucket, given, folder, *flags)
    assert err == ""
    return code, out.replace(bucket.name, "BUCKET").splitlines()
