"""Timestamps as the store writes them: ISO-8601, UTC, milliseconds. They sort as text."""

from datetime import UTC, datetime, timedelta


def utc_now() -> str:
    return _stamp(datetime.now(UTC))


def before(now: str, seconds: float) -> str:
    """The time that many seconds before `now`."""
    return _stamp(datetime.fromisoformat(now) - timedelta(seconds=seconds))


def after(moment: str) -> str:
    """The next time that can be told from this one."""
    return _stamp(datetime.fromisoformat(moment) + timedelta(milliseconds=1))


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
