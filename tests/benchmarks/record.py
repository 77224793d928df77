"""Records what a real client writes before an inference, for tests/benchmarks/heads.

`python -m tests.benchmarks.record HOST:PORT FILE CLIENT VERSION` passes connections on to a running
adapter from the port that it prints, and writes the headers of the first inference into FILE. It
ends with its standard input. What differs in each request (a signature, an id) is replaced by hand:
docs/bench.md, `--head`.
"""

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import hpack

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ENDS = ("/invoke", "/infer", "/invocations", "/ModelInfer")


def heads_in(data: bytes) -> Iterator[tuple[str, list[str]]]:
    """Path and lines of each request in what a caller sent on one connection so far."""
    if data.startswith(_PREFACE):
        yield from _of_frames(data[len(_PREFACE) :])
        return
    for part in data.split(b"\r\n\r\n"):
        lines = part.decode("latin-1").splitlines()
        if lines and lines[0].endswith(" HTTP/1.1"):
            yield lines[0].split(" ")[1], lines


def _of_frames(data: bytes) -> Iterator[tuple[str, list[str]]]:
    decoder = hpack.Decoder()
    while len(data) >= 9 + (size := int.from_bytes(data[:3])) and len(data) >= 9:
        if data[3] == 1:  # HEADERS; none of these clients pads or continues them
            block = data[9 : 9 + size][5 if data[4] & 0x20 else 0 :]
            fields = [(str(name), str(value)) for name, value in decoder.decode(block)]
            yield dict(fields)[":path"], [f"{name}: {value}" for name, value in fields]
        data = data[9 + size :]


def keep(file: Path, title: str, data: bytes) -> None:
    """The first inference among what was sent so far, unless there is one already."""
    for path, lines in () if file.exists() else heads_in(data):
        if path.partition("?")[0].endswith(_ENDS):
            file.write_text("\n".join([title, *lines]) + "\n")
            return


async def record(address: str, file: Path, title: str) -> None:
    """Until standard input ends."""

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray | None
    ) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            if seen is not None:
                seen += chunk
                keep(file, title, bytes(seen))
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        caller = pass_on(reader, to_server, bytearray())
        await asyncio.gather(caller, pass_on(from_server, writer, None), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    address_, file_, client, version = sys.argv[1:]
    line = f"# {client} {version}, recorded {datetime.now(UTC).date()}"
    asyncio.run(record(address_, Path(file_), line))
