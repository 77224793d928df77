"""Copies the models of ModelMesh's InferenceServices to keys of their names, for `model_store`.

    kubectl get inferenceservices -o json > isvcs.json
    python leave.py isvcs.json --to s3://BUCKET/PREFIX [--bucket KEY=BUCKET ...] [--copy]

What is copied lies below PREFIX/NAME then, so that callers who say NAME need not change. Nothing
is changed, and nothing but the list of files read, without --copy; then the server of the bucket
copies, and each model is left where it was, too. Predictors (kubectl get predictors) are taken as
well. A name is one key: of models of one name in several namespaces --namespace takes those of one.

It can be run again. What is below PREFIX/NAME and no longer at the model's own place, as an older
version of it, would be served with the rest: with --remove it is removed, once all is copied, and
without it the model is left out.

`--bucket` says which bucket an entry of the Secret storage-config has; without it the
InferenceService must name one. Credentials and the address (AWS_ENDPOINT_URL_S3) are found as boto3
finds them. The exit code is 1 if any model is left out: each has a line with the reason.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import boto3
from botocore.exceptions import BotoCoreError, ClientError

MODE = "serving.kserve.io/deploymentMode"
SCHEMA = "serving.kserve.io/schemaPath"
ENTRY = "serving.kserve.io/secretKey"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # as Kubernetes has them
# the fields of a predictor that name a model without modelFormat, in the controller's order
FRAMEWORKS = ("xgboost", "lightgbm", "sklearn", "tensorflow", "onnx", "pytorch", "triton", "pmml")
# how names of files end that these formats are known by; others need a config.pbtxt
ENDINGS = {
    "onnx": (".onnx",),
    "pytorch": (".pt", ".pth", ".torchscript"),
    "tensorflow": (".pb", ".graphdef"),
    "tensorrt": (".engine", ".plan"),
    "python": ("/model.py",),
}


class LeftOut(Exception):
    """Why a model cannot be taken along."""


@dataclass(frozen=True)
class Source:
    """Where a model is: a key or a folder of keys, and the key of its schema."""

    kind: str
    bucket: str
    path: str
    schema: "str | None"


@dataclass(frozen=True)
class Target:
    """Where the copies go."""

    bucket: str
    prefix: str

    def folder(self, name):
        return "/".join(filter(None, (self.prefix, name)))


def part(whole, name):
    """A part of an object, which may be missing."""
    return whole.get(name) or {}


def name_of(service):
    return part(service, "metadata").get("name", "?")


def label(service):
    """A model's kind, namespace and name, to tell it from others of the name."""
    namespace = part(service, "metadata").get("namespace", "default")
    return f"{service.get('kind', 'InferenceService')} {namespace}/{name_of(service)}"


def is_of_mesh(service):
    mode = part(part(service, "metadata"), "annotations").get(MODE)
    return service.get("kind") == "Predictor" or mode == "ModelMesh"


def model_of_predictor(spec):
    """The model of a Predictor, in the words of an InferenceService."""
    storage = part(spec, "storage")
    old = part(storage, "s3")
    if "persistentVolumeClaim" in storage:
        raise LeftOut("its storage is a persistentVolumeClaim, and not s3")
    return part(spec, "modelType").get("name"), {
        "storage": {
            "key": storage.get("key") or old.get("secretKey"),
            "path": storage.get("path") or spec.get("path"),
            "schemaPath": storage.get("schemaPath") or spec.get("schemaPath"),
            "parameters": storage.get("parameters") or {"bucket": old.get("bucket")},
        }
    }


def model_of(service):
    """The format, which may be None, and the model, as the controller reads them."""
    if not is_of_mesh(service):
        raise LeftOut(f"no model of ModelMesh: {MODE} is not ModelMesh")
    if service.get("kind") == "Predictor":
        return model_of_predictor(part(service, "spec"))
    predictor = part(part(service, "spec"), "predictor")
    if predictor.get("model") is not None:
        return part(predictor["model"], "modelFormat").get("name"), predictor["model"]
    for framework in FRAMEWORKS:
        if predictor.get(framework) is not None:
            return framework, predictor[framework]
    raise LeftOut(f"its predictor has no model, and none of {', '.join(FRAMEWORKS)}")


def source_of(service, buckets):
    """Where the model of an InferenceService or a Predictor is."""
    kind, model = model_of(service)
    if not kind:
        raise LeftOut("it has no modelFormat")
    storage, uri = part(model, "storage"), model.get("storageUri")
    annotations = part(service["metadata"], "annotations")
    schema = storage.get("schemaPath") or annotations.get(SCHEMA)
    key, path = storage.get("key") or annotations.get(ENTRY), storage.get("path")
    given = part(storage, "parameters")
    bucket = given.get("bucket") or buckets.get(key)
    if uri and path:
        raise LeftOut("it has a storageUri and a storage.path, which the controller refuses")
    if uri:
        if urlsplit(uri).scheme != "s3":
            raise LeftOut(f"{uri} is not in a bucket of S3")
        bucket, path = urlsplit(uri).netloc, urlsplit(uri).path
    elif given.get("type", "s3") != "s3":
        raise LeftOut(f"its storage is of the type {given['type']}, and not s3")
    if not (path or "").strip("/"):
        raise LeftOut("it names no path in a bucket")
    if not bucket:
        why = f"say --bucket {key}=BUCKET" if key else "it names no entry of storage-config"
        raise LeftOut(f"no bucket is known: {why}")
    return Source(kind, bucket, path.strip("/"), schema and schema.strip("/"))


def listed(s3, bucket, prefix):
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [each["Key"] for page in pages for each in page.get("Contents", [])]


def files(s3, bucket, path):
    """The keys at a path, each with where it is within the model: a lone file, or a folder's."""
    found = listed(s3, bucket, path)
    if path in found:
        return {path: PurePosixPath(path).name}
    below = [key for key in found if key.startswith(f"{path}/") and not key.endswith("/")]
    if not below:
        raise LeftOut(f"nothing is at s3://{bucket}/{path}")
    return {key: key.removeprefix(f"{path}/") for key in below}


def check(kind, found):
    """Whether the adapter can tell what the files are, as it is not told the format."""
    names = [f"/{each}" for each in found.values()]
    if any(each.endswith("/config.pbtxt") for each in names):
        return
    if kind not in ENDINGS:
        raise LeftOut(f"{kind} needs a config.pbtxt, and a backend of Triton")
    if kind == "python" and not any(each.endswith("/model.py") for each in names):
        raise LeftOut("no file of it is called model.py: that is how python is known here")
    if not any(each.endswith(ENDINGS[kind]) for each in names):
        wanted = " or ".join(ENDINGS[kind])
        raise LeftOut(f"no file of it ends with {wanted}: that is how {kind} is known here")


def wanted_of(s3, source):
    """The keys of a model, each with where it goes below the model's name."""
    found = files(s3, source.bucket, source.path)
    check(source.kind, found)
    if source.schema:
        try:
            s3.head_object(Bucket=source.bucket, Key=source.schema)
        except ClientError as error:
            where = f"s3://{source.bucket}/{source.schema}"
            raise LeftOut(f"its schema cannot be read at {where}: {error}") from None
        # the last of two would win, and this is the one that ModelMesh goes by
        found = {key: to for key, to in found.items() if to != "_schema.json"}
        found[source.schema] = "_schema.json"
    return found


def sources_in(services, buckets):
    """Every (bucket, path) that the mesh reads, as far as they are known."""
    for service in services:
        try:
            source = source_of(service, buckets)
        except LeftOut:
            continue
        yield source.bucket, source.path
        if source.schema:
            yield source.bucket, source.schema


def check_apart(target, folder, read_by_mesh):
    """Nothing that the mesh reads may be changed or removed, and no copy be copied."""
    for bucket, path in read_by_mesh:
        one, other = f"{folder}/", f"{path}/"
        if bucket == target.bucket and (one.startswith(other) or other.startswith(one)):
            where = f"s3://{bucket}/{path}, which the mesh reads"
            raise LeftOut(f"its copy would be mixed up with {where}: choose another --to")


def check_alone(service, services):
    """A name is one key."""
    name = name_of(service)
    if not NAME.fullmatch(name):
        raise LeftOut("that is no name of a model")
    others = [each for each in services if each is not service and is_of_mesh(each)]
    same = [label(each) for each in others if name_of(each) == name]
    if same and is_of_mesh(service):
        raise LeftOut(
            f"{label(service)} and {', '.join(same)} would have one key:"
            " take one of them, with --namespace or another list, to each --to"
        )


def leave(s3, service, services, target, options):
    """Say what goes where, and do it with --copy; LeftOut, with nothing changed, if it cannot."""
    name = name_of(service)
    check_alone(service, services)
    source = source_of(service, options.buckets)
    folder = target.folder(name)
    check_apart(target, folder, options.read_by_mesh)
    wanted = {key: f"{folder}/{to}" for key, to in wanted_of(s3, source).items()}
    there = {key for key in listed(s3, target.bucket, f"{folder}/") if not key.endswith("/")}
    old = sorted(there - set(wanted.values()))
    if old and not options.remove:
        those = ", ".join(f"s3://{target.bucket}/{each}" for each in old[:3])
        raise LeftOut(
            f"{len(old)} there that its own place does not have, as {those}: see --remove"
        )
    for key, to in wanted.items():
        if options.copy:
            s3.copy({"Bucket": source.bucket, "Key": key}, target.bucket, to)
        print(f"{name}: s3://{source.bucket}/{key} -> s3://{target.bucket}/{to}")
    for key in old:
        if options.copy:
            s3.delete_object(Bucket=target.bucket, Key=key)
        print(f"{name}: removed s3://{target.bucket}/{key}")


def services_in(options, parser):
    """The objects of the file, a list or one, of the namespace; ends the program without any."""
    try:
        given = json.loads(options.services.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{options.services}: {error}")
    if not isinstance(given, dict):
        parser.error(f"{options.services}: is not what kubectl get ... -o json prints")
    found = given.get("items", [given])
    options.read_by_mesh = set(sources_in(found, options.buckets))
    wanted = options.namespace
    found = [e for e in found if wanted in (None, part(e, "metadata").get("namespace"))]
    if not found:
        parser.error(f"{options.services}: has no models{f' of {wanted}' if wanted else ''}")
    return found


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("services", type=Path, help="what kubectl get inferenceservices printed")
    parser.add_argument("--to", required=True, metavar="s3://BUCKET/PREFIX")
    parser.add_argument("--bucket", action="append", default=[], metavar="KEY=BUCKET")
    parser.add_argument("--namespace", metavar="NS", help="take the models of this one alone")
    parser.add_argument("--copy", action="store_true", help="copy, and not only say what")
    parser.add_argument(
        "--remove", action="store_true", help="remove what is below a name and not at its source"
    )
    options = parser.parse_args()
    to = urlsplit(options.to)
    if to.scheme != "s3" or not to.netloc:
        parser.error(f"--to {options.to}: must be s3://BUCKET/PREFIX")
    options.buckets = dict(each.split("=", 1) for each in options.bucket if "=" in each)
    if len(options.buckets) != len(options.bucket):
        parser.error("--bucket: must be KEY=BUCKET, and each KEY once")
    return parser, options, Target(to.netloc, to.path.strip("/"))


def main():
    parser, options, target = arguments()
    services = services_in(options, parser)
    try:
        s3 = boto3.client("s3")
        s3.list_objects_v2(Bucket=target.bucket, MaxKeys=1)
    except (BotoCoreError, ClientError) as error:
        parser.error(f"--to {options.to}: {error}")
    left_out = 0
    for service in services:
        try:
            leave(s3, service, services, target, options)
        except (LeftOut, BotoCoreError, ClientError) as reason:
            left_out += 1
            print(f"{name_of(service)}: left out: {reason}")
    sys.exit(1 if left_out else 0)


if __name__ == "__main__":
    main()
