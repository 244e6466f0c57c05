"""Readers of one stream, in a process of their own: `python -m tests.chaos.watchers URL SESSION READING DEAF`.

`READING` of them read, and `DEAF` of them open the stream and never read a byte. Prints "open" when all have begun;
given a number, it prints how many events each reader got once all have that many.
"""

import asyncio
import json
import socket
import sys
from urllib.parse import urlsplit

_SMALL = 4096


async def main(url: str, session_id: str, reading: int, deaf: int) -> None:
    address = urlsplit(url)
    request = f"GET /eve/v1/session/{session_id}/stream HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode()
    readers = [Reader() for _ in range(reading)]
    tasks = [asyncio.create_task(each.read(address.hostname or "", address.port or 0, request)) for each in readers]
    silent = [await open_and_forget(address.hostname or "", address.port or 0, request) for _ in range(deaf)]
    await asyncio.gather(*(each.begun.wait() for each in readers))
    say("open")
    while line := await asyncio.to_thread(sys.stdin.readline):
        while min(each.lines for each in readers) < int(line):
            await asyncio.sleep(0.01)
        say([each.lines for each in readers])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in silent:
        each.close()


class Reader:
    """Counts the events that it is given."""

    def __init__(self) -> None:
        self.lines = 0
        self.begun = asyncio.Event()

    async def read(self, host: str, port: int, request: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
        writer.write(request)
        while line := await reader.readline():
            self.begun.set()
            # Chunk sizes and blank lines are no events.
            self.lines += line.startswith(b"{")


async def open_and_forget(host: str, port: int, request: bytes) -> socket.socket:
    """A reader that never reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (host, port))
    await loop.sock_sendall(connection, request)
    return connection


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
