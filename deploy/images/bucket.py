"""`bucket.py FOLDER` serves S3 at port 5000, with an archive NAME.tar.gz of each package in it.

The bucket is called `models`; what is in it is gone when this ends. No keys are checked.
"""

import io
import signal
import sys
import tarfile
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

PORT = 5000
FILLED = Path("/tmp/filled")  # noqa: S108 - of a container; its health check looks for it


def packed(package: Path) -> bytes:
    """Return the package as an archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(package, ".")
    return content.getvalue()


def main() -> None:
    ends = [signal.SIGTERM, signal.SIGINT]
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    server = ThreadedMotoServer("0.0.0.0", PORT, verbose=False)  # noqa: S104 - of the container
    server.start()
    s3 = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{PORT}",
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",  # noqa: S106 - none is checked
    )
    s3.create_bucket(Bucket="models")
    for package in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        s3.put_object(Bucket="models", Key=f"{package.name}.tar.gz", Body=packed(package))
        print(f"s3://models/{package.name}.tar.gz", flush=True)
    FILLED.touch()
    signal.sigwait(ends)
    server.stop()


if __name__ == "__main__":
    main()
