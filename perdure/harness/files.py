"""Files that a message names by URL: fetched once, when it is heard, and kept with it. History fetches nothing."""

import asyncio
import base64

import httpx2
from pydantic_ai._ssrf import safe_download

from perdure.protocol.deliveries import FilePart, TextPart
from perdure.settings import Settings

from .journal import HeardDelivery
from .prompt import bare_type, is_linked, largest_of

#: Seconds for all files of one delivery.
_PATIENCE = 20.0
_REDIRECTS = 3


class Files:
    """Fetches what a delivery names. What cannot be had is replaced by the reason, once and for all."""

    def __init__(self, settings: Settings) -> None:
        self._local = settings.fetch_local_files
        # Of all that one delivery names, as if it had brought it along.
        self._most = settings.max_file_bytes

    async def fetched(self, heard: HeardDelivery) -> HeardDelivery:
        message = heard.message
        if message is None or isinstance(message, str) or not any(is_linked(part) for part in message):
            return heard
        until = asyncio.get_running_loop().time() + _PATIENCE
        left = self._most
        parts: list[TextPart | FilePart] = []
        for part in message:
            largest = largest_of(part.media_type) if isinstance(part, FilePart) and is_linked(part) else None
            if isinstance(part, FilePart) and largest is not None:
                part, size = await self._fetched(part, min(left, largest), until)
                left -= size
            parts.append(part)
        return heard.model_copy(update={"message": tuple(parts)})

    async def _fetched(self, part: FilePart, most: int, until: float) -> tuple[FilePart, int]:
        try:
            async with asyncio.timeout_at(until):
                answer = await safe_download(
                    part.data,
                    allow_local=self._local,
                    max_redirects=_REDIRECTS,
                    timeout=int(_PATIENCE),
                    max_bytes=most,
                )
        except httpx2.HTTPStatusError as error:
            return _missing(part, f"the server answered {error.response.status_code}")
        except TimeoutError:
            return _missing(part, "it took too long")
        except httpx2.HTTPError:
            return _missing(part, "the server could not be reached, or sent too much")
        except Exception:
            # An address that is none, or none that may be asked.
            return _missing(part, "its address is not allowed, or it is too large")
        kind = bare_type(answer.headers.get("content-type", ""))
        if kind.partition("/")[0] != bare_type(part.media_type).partition("/")[0] or largest_of(kind) is None:
            return _missing(part, "the server sent something else")
        data = base64.b64encode(answer.content).decode()
        return part.model_copy(update={"data": data, "media_type": kind}), len(answer.content)


def _missing(part: FilePart, why: str) -> tuple[FilePart, int]:
    return part.model_copy(update={"missing": why}), 0
