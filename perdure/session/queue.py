"""What the mode of a message makes of it while its session is busy, and the order of what waits."""

from perdure.protocol.deliveries import QUEUE_MODES, QueueMode

#: Names that mean another mode.
_ALIASES: dict[str, QueueMode] = {"steer_backlog": "followup"}


def read_mode(name: object) -> QueueMode | None:
    """The mode with this name or alias; None if there is none."""
    alias = _ALIASES.get(name) if isinstance(name, str) else None
    return alias or next((mode for mode in QUEUE_MODES if mode == name), None)


def same_request(mode: QueueMode | None) -> tuple[str, ...]:
    """What the mode adds to the identity of a request. Without one it is that of a `followup`."""
    return () if mode is None or mode == "followup" else (mode,)


def between(low: str, high: str | None) -> str:
    """A key that sorts after `low` and before `high`; None: nothing comes after it.

    Keys are time stamps, and what this has made of them: they differ in digits only, and none ends in 0.
    """
    if high is None or not high.startswith(low):
        return f"{low}5"
    rest = high.removeprefix(low)
    zeros = rest[: len(rest) - len(rest.lstrip("0"))]
    first = int(rest[len(zeros)])
    return f"{low}{zeros}{first // 2}" if first > 1 else f"{low}{zeros}05"
