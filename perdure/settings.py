"""The settings from the environment. Every variable starts with `PERDURE_`; docs/settings.md lists them."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from perdure.errors import Invalid
from perdure.protocol.names import ALL_POOLS, POOL_NAMES, is_pool
from perdure.protocol.stream_policy import StreamPolicy, stream_policy

_PREFIX = "PERDURE_"
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
#: Read elsewhere: by commands, by `perdure dev`, by tests, and by the compose file.
_OTHERS = ("READY_FILE", "TEMPORAL_BIN", "KILL_POINT", "KILL_ONCE_FILE", "APP", "PUBLIC_PORT")
#: Read by `perdure chat`. Too short to be what a misspelt name means.
_OF_CALLERS = ("URL", "KEY")
#: From which similarity on, between 0 and 1, an unknown name is taken for a misspelt setting.
_ALIKE = 0.65


def _checked(address: str) -> str:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        usable = bool(parts.hostname) and parts.port != 0 and not any(map(str.isspace, address))
    except ValueError:
        usable = False
    if not usable:
        raise PydanticCustomError("address", "An address is HOST:PORT, 127.0.0.1:7233 for one")
    return address


def _checked_url(url: str | None) -> str | None:
    if url is None:
        return None
    address = _checked(url)
    parts = urlsplit(address)
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
    if parts.scheme not in ("http", "https") or more:
        # The contract knows callbacks at one path only.
        raise PydanticCustomError("address", "A public URL is http(s)://HOST[:PORT], without a path")
    return address.rstrip("/")


def _checked_prefix(prefix: str) -> str:
    if _PATH.fullmatch(prefix) is None:
        raise PydanticCustomError("prefix", "A prefix is a path like /flue, without a slash at its end")
    return prefix


def _checked_listener(address: str | None) -> str | None:
    return None if address is None else _checked(address)


def _unless_empty(value: object) -> object:
    return None if value == "" else value


Address: TypeAlias = Annotated[str, AfterValidator(_checked)]
#: A variable without a value, as compose files set it, is not set.
Name: TypeAlias = Annotated[str | None, BeforeValidator(_unless_empty)]


class Settings(BaseSettings):
    """The settings of a deployment."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="ignore")

    # Data and addresses.
    data_dir: Path = Path(".perdure")
    # Default: SQLite in the data directory. `postgresql://…` for more than one machine.
    database_url: SecretStr | None = None
    # Whether a commit to SQLite waits for the disk, so that a power cut loses nothing either.
    durable: bool = False
    temporal_address: Address = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    temporal_api_key: SecretStr | None = None
    temporal_tls: bool = False
    # The address of the Temporal UI; links in responses start with it.
    temporal_ui_url: str = "http://127.0.0.1:8233"
    # The prefix of all task queues.
    task_queue: str = "perdure"

    # The agents: `module:attribute[,module:attribute…]`; the first is the default agent.
    agents: str = "perdure.agents.demo:agent"
    # The runs: `module:attribute[,module:attribute…]`. Those in the lists of `agents` are found, too.
    runs: str = ""
    # The model of agents that name none.
    model: str | None = None

    # How turns run: each as a child workflow, or in the workflow of their session. `Agent(turns=…)` overrides it.
    turns: Literal["child", "inline"] = "child"

    # Versioned workers: both or none.
    deployment: Name = None
    build_id: Name = None

    # HTTP.
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    # Default continuation tokens are derived from it. All API processes need the same one.
    secret: SecretStr | None = None
    # Concurrent connections. Default: the limit of file descriptors less a reserve.
    max_connections: int | None = Field(default=None, ge=1)
    # `name=sha256-hex[+attribute=value…][,name=sha256-hex…]`; `perdure api-key NAME` prints an entry.
    api_keys: str = ""
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_jwks_url: str | None = None
    # Claims with the roles of a user; a dot selects a part of a claim.
    jwt_role_claims: str = "role,roles,scope"
    # Callers on this machine need no key as long as no keys or tokens are configured. With this, they never need one.
    trust_loopback: bool = False

    # Who may see the work of all callers, beside holders of the role `operator`: names of API keys, or `jwt:ada`.
    operators: str = ""

    # Where other servers reach this API: agents there report the end of their work to it.
    public_url: Annotated[str | None, BeforeValidator(_unless_empty), AfterValidator(_checked_url)] = None
    # Whether sessions may deliver their callbacks to private addresses.
    local_callbacks: bool = False

    # The path before those of agents and runs as clients of Flue know them: /flue/runs for `/flue`.
    flue_prefix: Annotated[str, AfterValidator(_checked_prefix)] = ""
    # `off`: there is no console at `/`.
    console: Literal["on", "off"] = "on"
    # `on`: callers may create and write streams of their own, at /v1/stream/….
    streams: Literal["on", "off"] = "off"
    # Milliseconds for which pieces of a reply are collected before they are written as one event.
    stream_buffer_ms: float = Field(default=30.0, ge=0, le=60_000)
    # Types of events that readers do not get, and types that they get without their content.
    stream_exclude: str = ""
    stream_redact: str = ""
    # Seconds that a read of a Durable Stream with `live=long-poll` waits for something new.
    long_poll_seconds: float = Field(default=30.0, gt=0, le=300)

    # Limits.
    max_message_bytes: int = Field(default=1_048_576, ge=1)
    max_file_bytes: int = Field(default=26_214_400, ge=1)
    # The allowed media types of files: `*/*`, or `image/*,application/pdf`. Empty: no files.
    file_media_types: str = "*/*"
    # Whether file URLs in messages may have private addresses, including those of this machine.
    fetch_local_files: bool = False
    max_body_bytes: int = Field(default=67_108_864, ge=1)
    max_tool_output_bytes: int = Field(default=65_536, ge=1)
    # Deliveries that may wait in one session; the next one is refused with 429.
    max_inbox: int = Field(default=100, ge=1, le=500)
    # What the streams that one caller writes may have together: their number, and the bytes of their items.
    max_streams: int = Field(default=1_000, ge=1)
    max_stream_bytes: int = Field(default=1_073_741_824, ge=1)
    # A worker that sends no heartbeat for so many seconds counts as dead.
    heartbeat_timeout: float = Field(default=5.0, gt=0, le=600)
    # A model call during which the provider sends nothing for so many seconds fails and is retried.
    model_silence: float = Field(default=120.0, gt=0, le=86_400)

    # What all sessions of a principal may spend in a period: tokens in all, and US dollars.
    principal_tokens: int | None = Field(default=None, ge=1)
    principal_cost: float | None = Field(default=None, gt=0, le=1_000_000_000)
    principal_period: Literal["day", "month", "ever"] = "month"
    # Prices of models in US dollars for a million tokens: `{"openai:my-model": {"input": 1, "output": 4}}`.
    prices: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])

    # The pools whose tools a worker runs, and nothing else: `gpu,ocr`. Empty: everything but tools of pools.
    # `all`: everything, and all pools that the agents declare.
    pools: str = ""
    # Sessions that a worker keeps in memory. It should exceed the number of busy ones.
    cached_sessions: int = Field(default=200, ge=1)
    # `on`: workflows run in Temporal's sandbox, which finds forbidden imports and calls, and costs a tenth of a turn.
    sandbox: Literal["on", "off"] = "off"
    # Concurrent workflow tasks of a worker, for drivers and for turns each. They share one processor.
    concurrent_decisions: int = Field(default=4, ge=2)

    # `off`: no arguments and no text in the Temporal UI.
    ui_detail: Literal["on", "off"] = "on"
    log_level: str = "info"

    # The names of spans, attributes and metrics for generative AI: those of today, those of 1.41, or both.
    telemetry_names: Literal["current", "v1.41", "both"] = "current"
    # Where the content of model calls and tool calls may go: `off`, `traces`, `logs` or `traces,logs`.
    telemetry_content: str = "off"
    # The longest attribute with content, in bytes.
    telemetry_content_bytes: int = Field(default=16_384, ge=256, le=1_048_576)
    # How spans name users: not at all, by a hash (`user.hash`), or by their names (`user.id`).
    telemetry_users: Literal["off", "hash", "id"] = "off"
    # `on`: the API serves metrics for Prometheus at /metrics, to operators.
    metrics: Literal["on", "off"] = "off"
    # Worker and API each serve their metrics to whoever reaches this address.
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[Annotated[int, Field(ge=1, le=65_535)] | None, BeforeValidator(_unless_empty)] = None
    # Where Temporal's SDK serves its own metrics.
    temporal_metrics: Annotated[str | None, BeforeValidator(_unless_empty), AfterValidator(_checked_listener)] = None

    # After how many days reports of attempts are deleted.
    keep_attempts_days: float = Field(default=30, gt=0, le=36_500)
    # After how many days the deltas and messages of earlier turns, and the records of ended sessions, are deleted.
    # Default: never.
    keep_deltas_days: float | None = Field(default=None, gt=0, le=36_500)
    keep_messages_days: float | None = Field(default=None, gt=0, le=36_500)
    keep_records_days: float | None = Field(default=None, gt=0, le=36_500)

    @property
    def keep_seconds(self) -> tuple[float | None, float | None, float | None]:
        """For how many seconds deltas, messages and records are kept. What is needed for later classes goes first."""
        days = (self.keep_deltas_days, self.keep_messages_days, self.keep_records_days)
        known = [each for each in days if each is not None]
        if known != sorted(known):
            raise Invalid("PERDURE_KEEP_…_DAYS: deltas are not kept longer than messages, nor these than records.")
        deltas, messages, records = (None if each is None else each * 86_400 for each in days)
        return deltas, messages, records

    @property
    def stream_policy(self) -> StreamPolicy:
        """What readers of events do not see. `Invalid` when clients could not do without it."""
        return stream_policy(_names(self.stream_exclude), _names(self.stream_redact))

    @property
    def content_destinations(self) -> frozenset[Literal["traces", "logs"]]:
        """Where content may go. `Invalid` when one of the names is none."""
        named = _names(self.telemetry_content)
        found: set[Literal["traces", "logs"]] = set()
        for name in () if named == ("off",) else named:
            if name not in ("traces", "logs"):
                raise Invalid(f"PERDURE_TELEMETRY_CONTENT is off, traces, logs or traces,logs; not {name!r}.")
            found.add(name)
        return frozenset(found)

    @property
    def metrics_listener(self) -> tuple[str, int] | None:
        """Where a process serves its metrics."""
        return None if self.metrics_port is None else (self.metrics_host, self.metrics_port)

    @property
    def only_pools(self) -> tuple[str, ...]:
        """The pools that a worker serves instead of everything else."""
        named = _names(self.pools)
        if named == (ALL_POOLS,):
            return ()
        for each in named:
            if not is_pool(each):
                raise Invalid(f"PERDURE_POOLS: {each!r} cannot be a pool: {POOL_NAMES}.")
        return named

    @property
    def has_principal_budget(self) -> bool:
        return self.principal_tokens is not None or self.principal_cost is not None

    @property
    def database(self) -> str:
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir / 'perdure.db'}{'?synchronous=full' if self.durable else ''}"


def _names(given: str) -> tuple[str, ...]:
    """The names in a list with commas, each once."""
    return tuple(dict.fromkeys(each.strip() for each in given.split(",") if each.strip()))


def read_settings(**given: Any) -> Settings:
    """The environment, with what is given laid over it; None means: as the environment says."""
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise Invalid(f"{_PREFIX}{name}: {first['msg']}.") from None


def misspelt(environment: Iterable[str]) -> list[str]:
    """A warning for each variable that is no setting but has a similar name."""
    return [
        f"{variable} is not a setting, and changes nothing; {meant} is one."
        for variable, meant in unknown(environment)
        if meant is not None
    ]


def unknown(environment: Iterable[str]) -> list[tuple[str, str | None]]:
    """The variables that have our prefix and are no settings, each with the setting that has a similar name."""
    known = [*(name.upper() for name in Settings.model_fields), *_OTHERS]
    found: list[tuple[str, str | None]] = []
    for variable in sorted(environment):
        name = variable.upper().removeprefix(_PREFIX)
        if not variable.upper().startswith(_PREFIX) or name in (*known, *_OF_CALLERS):
            continue
        meant = difflib.get_close_matches(name, known, 1, _ALIKE)
        found.append((variable, f"{_PREFIX}{meant[0]}" if meant else None))
    return found
