"""The route that deletes a session."""

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from temporalio.service import RPCError, RPCStatusCode

from api.stream.broadcast import Pace
from perdure.runtime import deletions
from tests.api.asking import known_as
from tests.api.served import Api, serving, turn_events


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Temporal lists is believed at the first look."""
    monkeypatch.setattr(deletions, "SETTLED", 0.0)


async def test_only_the_owner_deletes_a_session_and_sees_the_receipt(people: Api) -> None:
    created = await people.create()
    path = f"/v1/sessions/{created['sessionId']}"

    refused = await people.http.delete(path, headers=known_as("bob"))
    deleted = await people.http.delete(path)
    afterwards = await people.http.delete(path, headers=known_as("bob"))
    again = await people.http.delete(path)
    unknown = await people.http.delete("/v1/sessions/ses_unknown")

    assert [each.status_code for each in (refused, deleted, afterwards, again, unknown)] == [404, 200, 404, 200, 404]
    body = deleted.json()
    assert (body["status"], body["deleted"]["sessions"], body["deleted"]["deliveries"]) == ("deleted", 1, 1)
    assert again.json() == body
    assert refused.json() == afterwards.json() == unknown.json()
    assert (await people.http.get(path)).status_code == 404


async def test_an_open_stream_ends_with_the_session(api: Api) -> None:
    created = await api.create()
    await api.emit(created["sessionId"], *turn_events(0))

    async with api.stream(created["sessionId"]) as reading:
        before = await reading.events(len(turn_events(0)))
        await api.http.delete(f"/v1/sessions/{created['sessionId']}")
        rest = await reading.rest()

    assert [event["type"] for event in rest][-1] == "session.failed"
    assert rest[-1]["data"]["code"] == "SESSION_DELETED"
    indexes = [event["meta"]["index"] for event in [*before, *rest]]
    assert indexes == list(range(len(indexes)))
    late = await api.http.get(f"/eve/v1/session/{created['sessionId']}/stream")
    assert late.status_code == 404


async def test_a_stream_ends_also_when_another_process_has_deleted_the_last_event(tmp_path: Path) -> None:
    async with serving(tmp_path, pace=Pace(recheck=0.05)) as api:
        created = await api.create()
        await api.emit(created["sessionId"], *turn_events(0))

        async with api.stream(created["sessionId"]) as reading:
            await reading.events(len(turn_events(0)))
            with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as other:
                for table in ("sessions", "events"):
                    other.execute(f"DELETE FROM {table}")

            # Not a clean end: there may have been more.
            with pytest.raises(httpx2.HTTPError):
                await reading.rest()


async def test_while_temporal_is_away_the_rows_go_and_the_rest_is_finished_later(api: Api) -> None:
    created = await api.create()
    api.temporal.failure = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    path = f"/v1/sessions/{created['sessionId']}"

    first = await api.http.delete(path)
    assert (first.status_code, first.json()["status"]) == (202, "deleting")
    assert await api.store.session(created["sessionId"]) is None
    api.temporal.failure = None

    assert (await api.http.delete(path)).status_code == 200
