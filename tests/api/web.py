"""Any ASGI application on a free port."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from api.server import listen, run


@asynccontextmanager
async def web(app: ASGIApp) -> AsyncGenerator[str]:
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    stop, ready = asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(run(app, sock, stop, ready=ready))
    await ready.wait()
    try:
        yield url
    finally:
        stop.set()
        await server
