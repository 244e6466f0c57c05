"""Principals: authenticated callers."""

from pydantic import Field

from .wire import Wire


class Principal(Wire):
    """A caller that an authenticator recognised."""

    principal_id: str
    principal_type: str
    authenticator: str
    issuer: str | None = None
    subject: str | None = None
    attributes: dict[str, str | list[str]] = Field(default_factory=dict[str, str | list[str]])

    @property
    def address(self) -> str:
        """How authors name this caller: the authenticator, and the caller's name there."""
        return f"{self.authenticator}:{self.subject or self.principal_id}"

    @property
    def owner(self) -> str:
        """The owner of the caller's sessions: two principals with the same owner are the same caller."""
        return "|".join((self.authenticator, self.issuer or "", self.principal_id))


LOCAL = Principal(principal_id="local-dev", principal_type="local-dev", authenticator="local-dev")
