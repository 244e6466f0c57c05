"""Files that a message names by URL: fetched once, bounded, and never again."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic_ai.messages import BinaryContent, ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel

from perdure.errors import ModelFailed
from perdure.models.provider import ProviderModel
from perdure.protocol.deliveries import FilePart
from perdure.settings import Settings
from perdure.testing import ScriptedModel
from tests.support.lab import lab

PNG = b"\x89PNG and so on"


class Server:
    """Answers each path in its own way, and counts."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.together = asyncio.Barrier(2)
        self.port = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        self.paths.append(path)
        if path == "/together":
            # Answered once two have asked.
            await self.together.wait()
            path = "/a.png"
        status, kind, body = {
            "/a.png": ("200 OK", "image/png", PNG),
            "/page": ("200 OK", "text/html", b"<html>"),
            "/drawing": ("200 OK", "image/svg+xml", b"<svg/>"),
            "/huge": ("200 OK", "image/png", b"x" * 200_000),
        }.get(path, ("404 Not Found", "text/plain", b"no"))
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving() -> AsyncGenerator[Server]:
    server = Server()
    async with await asyncio.start_server(server.connected, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


def settings(local: bool = True) -> Settings:
    return Settings(agents="", fetch_local_files=local, max_file_bytes=100_000)


def linked(url: str, media_type: str = "image/png") -> Any:
    return (FilePart(media_type=media_type, data=url, filename="a.png"),)


def shown(model: ScriptedModel, prompt: int) -> Any:
    """What the first message of this prompt says."""
    part: Any = model.prompts[prompt].messages[0].parts[0]
    (content,) = part.content
    return content


async def test_a_file_is_fetched_once_and_kept() -> None:
    model = ScriptedModel(["A picture.", "Still one."])
    async with serving() as server, lab(model, settings=settings()) as it:
        await it.model(await it.deliver(linked(server.url("/a.png"))))
        await it.model(await it.deliver("Look again"), turn=1)
        # Another process has it from the store.
        it.harness = it.worker()

        assert server.paths == ["/a.png"]
        for prompt in range(2):
            assert shown(model, prompt) == BinaryContent(PNG, media_type="image/png")
        (record,) = [each for each in await it.store.records(it.session) if each.key == "delivery/0" and each.turn == 0]
        assert record.body["message"][0]["data"] == base64.b64encode(PNG).decode()


async def test_the_deliveries_of_a_turn_do_not_wait_for_each_others_files() -> None:
    """A turn that executes answers has half a minute for all that it reads."""
    model = ScriptedModel(["Two pictures."])
    async with serving() as server, lab(model, settings=settings()) as it, asyncio.timeout(10):
        deliveries = [await it.deliver(linked(server.url("/together"))) for _ in range(2)]
        await it.model(*deliveries)

    parts: Any = model.prompts[0].messages[0].parts
    assert [part.content for part in parts] == [[BinaryContent(PNG, media_type="image/png")]] * 2


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/gone", "answered 404"),
        ("/page", "sent something else"),
        ("/drawing", "sent something else"),
        ("/huge", "too large"),
    ],
)
async def test_a_file_that_cannot_be_fetched_is_reported_to_the_model_and_not_tried_again(path: str, why: str) -> None:
    model = ScriptedModel(["I cannot see it.", "Still not."])
    async with serving() as server, lab(model, settings=settings()) as it:
        await it.model(await it.deliver(linked(server.url(path))))
        await it.model(await it.deliver("Look again"), turn=1)

        assert server.paths == [path]
        assert "could not be fetched" in shown(model, 0)
        assert shown(model, 1) == shown(model, 0)
        assert why in shown(model, 0)
        assert (await it.types())[-1] == "session.waiting"


async def test_a_private_address_is_not_asked() -> None:
    model = ScriptedModel(["No."])
    async with serving() as server, lab(model, settings=settings(local=False)) as it:
        await it.model(await it.deliver(linked(server.url("/a.png"))))

        assert server.paths == []
        assert "not allowed" in shown(model, 0)


async def test_a_file_that_the_provider_refuses_does_not_come_along_again() -> None:
    refusal = ModelFailed("The model answered 400: no image.", statusCode=400)
    model = ScriptedModel([refusal, "Fine."])
    part = FilePart(media_type="image/png", data=base64.b64encode(b"no picture").decode(), filename="a.png")
    async with lab(model) as it:
        await it.model(await it.deliver((part,)))
        await it.model(await it.deliver("Never mind"), turn=1)

        assert isinstance(shown(model, 0), BinaryContent)
        assert "left out" in shown(model, 1)


def kept(media_type: str, data: bytes = b"%PDF-1.7") -> Any:
    return (FilePart(media_type=media_type, data=base64.b64encode(data).decode(), filename="a"),)


@pytest.mark.parametrize("media_type", ["application/pdf; version=1.7", "Application/PDF", "IMAGE/png"])
async def test_a_file_is_sent_under_its_bare_type(media_type: str) -> None:
    model = ScriptedModel(["Fine."])
    async with lab(model) as it:
        await it.model(await it.deliver(kept(media_type)))

    assert shown(model, 0) == BinaryContent(b"%PDF-1.7", media_type=media_type.partition(";")[0].lower())


@pytest.mark.parametrize("media_type", ["application/pdfx", "image/svg+xml", "image/", "image/a b", "image"])
async def test_a_file_of_no_type_that_a_model_takes_is_only_named(media_type: str) -> None:
    model = ScriptedModel(["Fine."])
    async with lab(model) as it:
        await it.model(await it.deliver(kept(media_type)))

    assert shown(model, 0) == f"Attached file a ({media_type})"


async def test_a_file_that_has_no_form_for_a_provider_fails_one_turn_and_no_other() -> None:
    """As pydantic-ai does for a PDF and a provider that takes none: it raises before anything is sent."""

    async def stream(messages: list[ModelMessage], _: AgentInfo) -> AsyncGenerator[str]:
        if any(isinstance(each, BinaryContent) for part in messages[0].parts for each in getattr(part, "content", ())):
            raise NotImplementedError("documents")
        yield "Fine."

    model = ProviderModel("picky", FunctionModel(stream_function=stream), silence=5)
    async with lab(model) as it:
        await it.model(await it.deliver(kept("application/pdf")))
        await it.model(await it.deliver("Never mind"), turn=1)

        assert [each["code"] for each in await it.emitted("turn.failed")] == ["MODEL_CALL_FAILED"]
        assert [each["message"] for each in await it.emitted("message.completed")] == ["Fine."]
