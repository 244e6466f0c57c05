"""Constructors of `Responders` for authors: `responders=responders.role("finance", quorum=2)`."""

from perdure.errors import InvalidDeclaration
from perdure.protocol.inputs import Responders


def requester() -> Responders:
    """The owner of the session; the default."""
    return Responders(kind="requester")


def anyone(*, quorum: int = 1) -> Responders:
    """Every principal that may see the request."""
    return checked(Responders(kind="anyone", quorum=quorum))


def role(*roles: str, quorum: int = 1) -> Responders:
    """Principals whose attribute `role` is, or contains, one of these."""
    return attribute("role", *roles, quorum=quorum)


def attribute(name: str, *values: str, quorum: int = 1) -> Responders:
    """Principals whose attribute of this name is, or contains, one of these values."""
    return checked(Responders(kind="attribute", attribute=name, values=values, quorum=quorum))


def principals(*ids: str, quorum: int = 1) -> Responders:
    """The principals with these addresses, each with its authenticator: `jwt:ada`, `api-key:billing`.

    A bare name is refused: a service and a user may have the same one.
    """
    for each in ids:
        authenticator, _, subject = each.partition(":")
        if not (authenticator and subject):
            raise InvalidDeclaration(f"Name a principal as AUTHENTICATOR:SUBJECT, `jwt:ada` for one, not {each!r}.")
    return checked(Responders(kind="principals", values=ids, quorum=quorum))


def checked(responders: Responders) -> Responders:
    """Refuse responders that can never answer."""
    kind, values, quorum = responders.kind, responders.values, responders.quorum
    if quorum < 1:
        raise InvalidDeclaration("A quorum must be at least 1.")
    if kind in ("attribute", "principals") and not all(values or ("",)):
        raise InvalidDeclaration(f"Responders by {kind} must name at least one value, and none that is empty.")
    if kind == "attribute" and not responders.attribute:
        raise InvalidDeclaration("Responders by attribute must name the attribute.")
    most = {"requester": 1, "principals": len(set(values))}.get(kind)
    if most is not None and quorum > most:
        raise InvalidDeclaration(f"A quorum of {quorum} can never be reached: there is only {most} to answer.")
    return responders
