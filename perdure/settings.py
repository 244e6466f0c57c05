"""The environment, read once. Every variable starts with `PERDURE_`; docs/settings.md lists them."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from perdure.errors import Invalid

_PREFIX = "PERDURE_"
#: Read elsewhere: by commands, by `perdure dev`, by tests, and by the compose file.
_OTHERS = ("READY_FILE", "TEMPORAL_BIN", "KILL_POINT", "KILL_ONCE_FILE", "APP", "PUBLIC_PORT")
#: How much alike two names are, from 0 to 1, of which one is probably the other.
_ALIKE = 0.65


class Settings(BaseSettings):
    """What a deployment may choose."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="ignore")

    # Where things are.
    data_dir: Path = Path(".perdure")
    # Default: SQLite under the data directory. `postgresql://…` when one machine is not enough.
    database_url: SecretStr | None = None
    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    temporal_api_key: SecretStr | None = None
    temporal_tls: bool = False
    # Where people look at workflows; links in API answers start with it.
    temporal_ui_url: str = "http://127.0.0.1:8233"
    # Prefix of all task queues.
    task_queue: str = "perdure"

    # What is served. `module:attribute[,module:attribute…]`; the first is the default agent.
    agents: str = "perdure.agents.demo:agent"
    # Overrides the model of agents that name none.
    model: str | None = None

    # Versioned workers: both or none.
    deployment: str | None = None
    build_id: str | None = None

    # HTTP.
    host: str = "127.0.0.1"
    port: int = 8000
    # Default continuation tokens are derived from it. Every process that serves HTTP must have the same one.
    secret: SecretStr | None = None
    # Connections at once; by default as many as there are descriptors for, less a reserve.
    max_connections: int | None = Field(default=None, ge=1)
    # `name=sha256-hex[+attribute=value…][,name=sha256-hex…]`; `perdure api-key NAME` prints an entry.
    api_keys: str = ""
    jwt_issuer: str | None = None
    jwt_audience: str | None = None
    jwt_jwks_url: str | None = None
    # Claims that hold the roles of a user; a dot leads into a claim.
    jwt_role_claims: str = "role,roles,scope"
    # Callers on this machine need no key while nobody else has one. This says so also beside keys and tokens.
    trust_loopback: bool = False

    # Limits.
    max_message_bytes: int = Field(default=1_048_576, ge=1)
    max_file_bytes: int = Field(default=26_214_400, ge=1)
    # Which files a message may carry: `*/*`, or `image/*,application/pdf`. Empty: none.
    file_media_types: str = "*/*"
    # Whether files that messages name by URL may be fetched from private addresses, this machine's own among them.
    fetch_local_files: bool = False
    max_body_bytes: int = Field(default=67_108_864, ge=1)
    max_tool_output_bytes: int = Field(default=65_536, ge=1)
    # Deliveries that may wait in one session; the next one is refused with 429.
    max_inbox: int = Field(default=100, ge=1, le=500)
    # A worker that says nothing for this long is taken for dead.
    heartbeat_timeout: float = Field(default=5.0, gt=0, le=600)
    # A provider that sends nothing for this long has failed, and is asked again.
    model_silence: float = Field(default=120.0, gt=0, le=86_400)

    # Sessions that a worker keeps in memory; more than are busy at once.
    cached_sessions: int = Field(default=200, ge=1)
    # Workflow tasks that a worker works on at once, of drivers and of turns each. They share one processor.
    concurrent_decisions: int = Field(default=4, ge=2)

    # What people see. `off`: no arguments and no text in the Temporal UI.
    ui_detail: Literal["on", "off"] = "on"
    log_level: str = "info"

    @property
    def database(self) -> str:
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir / 'perdure.db'}"


def read_settings(**given: Any) -> Settings:
    """The environment, with what is given laid over it; None means: as the environment says."""
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise Invalid(f"{_PREFIX}{name}: {first['msg']}.") from None


def misspelt(environment: Iterable[str]) -> list[str]:
    """A sentence for each variable that is no setting, and is called almost like one."""
    known = [*(name.upper() for name in Settings.model_fields), *_OTHERS]
    sentences: list[str] = []
    for variable in sorted(environment):
        name = variable.upper().removeprefix(_PREFIX)
        if not variable.upper().startswith(_PREFIX) or name in known:
            continue
        if meant := difflib.get_close_matches(name, known, 1, _ALIKE):
            sentences.append(f"{variable} is not a setting, and changes nothing; {_PREFIX}{meant[0]} is one.")
    return sentences
