"""Write adapter/_proto from protos/, or with --check say which files are stale.

Message classes alone: the service is registered by hand in frontends/grpc/modelmesh.py, because a
generated one refuses every grpcio older than its generator.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "adapter/_proto"


def generate(folder: Path) -> dict[str, str]:
    """The generated modules by name. They import each other as parts of PACKAGE."""
    sources = sorted(path.name for path in (ROOT / "protos").glob("*.proto"))
    flags = [f"-I{PACKAGE}={ROOT / 'protos'}", f"--python_out={folder}", f"--pyi_out={folder}"]
    code = protoc.main(["protoc", *flags, *(f"{PACKAGE}/{source}" for source in sources)])
    if code:
        sys.exit(code)
    made = sorted((folder / PACKAGE).iterdir())
    return {path.name: path.read_text(encoding="utf-8") for path in made} | {"__init__.py": ""}


def found() -> dict[str, str]:
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in (ROOT / PACKAGE).glob("*")
        if path.is_file()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        wanted = generate(Path(folder))
    there = found()
    stale = sorted(n for n in {*wanted, *there} if wanted.get(n) != there.get(n))
    if is_check:
        for name in stale:
            print(f"{PACKAGE}/{name} is stale: run scripts/gen_protos.py")
        return 1 if stale else 0
    for name in there.keys() - wanted.keys():
        (ROOT / PACKAGE / name).unlink()
    for name, text in wanted.items():
        (ROOT / PACKAGE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
