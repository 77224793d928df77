"""Whether Triton answers."""

import asyncio
import errno


async def is_live(address: str) -> bool | None:
    """None when that cannot be seen, for want of descriptors."""
    host, _, port = address.rpartition(":")
    request = f"GET /v2/health/live HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request.encode())
            status = await reader.readline()
        finally:
            writer.close()
            await writer.wait_closed()
    except OSError as error:
        return None if error.errno in {errno.EMFILE, errno.ENFILE} else False
    return status.startswith(b"HTTP/1.1 200 ")
