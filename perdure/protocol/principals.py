"""Who speaks."""

from pydantic import Field

from .wire import Wire


class Principal(Wire):
    """Whoever an authenticator recognised."""

    principal_id: str
    principal_type: str
    authenticator: str
    issuer: str | None = None
    subject: str | None = None
    attributes: dict[str, str | list[str]] = Field(default_factory=dict[str, str | list[str]])

    @property
    def address(self) -> str:
        """How authors name this caller: whoever recognised it, and the name under which."""
        return f"{self.authenticator}:{self.subject or self.principal_id}"

    @property
    def owner(self) -> str:
        """What a session is owned by: two principals with the same owner are the same caller."""
        return "|".join((self.authenticator, self.issuer or "", self.principal_id))


LOCAL = Principal(principal_id="local-dev", principal_type="local-dev", authenticator="local-dev")
