"""Instructions in sections, which are rendered before every step from the state of the session."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from string import Template
from typing import Literal, TypeAlias, cast

from perdure.agents.context import SessionView
from perdure.errors import InvalidDeclaration

from .plan import Plan

#: Text, with the request's fields as `$name`; or a function of the session.
Body: TypeAlias = str | Callable[[SessionView], str | Awaitable[str]]

Visibility: TypeAlias = Literal["full", "summary"]


@dataclass(frozen=True)
class Section:
    """A part of the instructions under a title of its own. One without text is left out."""

    title: str
    body: Body
    #: What stands for it when the prompt shows summaries.
    summary: Body | None = None

    def __post_init__(self) -> None:
        if not (isinstance(cast("object", self.title), str) and self.title.strip()):
            raise InvalidDeclaration(f"A section needs a title; not {self.title!r}.")
        for body in (self.body, *([] if self.summary is None else [self.summary])):
            if not (isinstance(body, str) or callable(body)):
                raise InvalidDeclaration(
                    f"Section {self.title!r}: write text, or a function of the session: "
                    "`Section('Findings', lambda session: …)`."
                )

    async def rendered(self, session: SessionView, visibility: Visibility = "full") -> str:
        """The section with its title; empty if it has no text."""
        body = self.summary if visibility == "summary" and self.summary is not None else self.body
        if isinstance(body, str):
            text = Template(body).safe_substitute({name: str(value) for name, value in session.request.items()})
        else:
            made = body(session)
            # Its author may have nothing to say, and no type checker.
            text = (await made if inspect.isawaitable(made) else made) or ""
        return f"# {self.title}\n{text.strip()}" if text.strip() else ""


@dataclass(frozen=True)
class Progress:
    """The section that shows the plan: what is done, and what remains."""

    title: str = "Progress"

    async def rendered(self, session: SessionView, visibility: Visibility = "full") -> str:
        """The plan with the section's title."""
        return f"# {self.title}\n{progress_of(session.plan)}"


def progress_of(plan: Plan | None) -> str:
    """The plan as text for the model."""
    if plan is None:
        return "No progress yet. Create a plan to get started."
    lines = [f"Objective: {plan.objective}"]
    if plan.done:
        lines += ["Completed:", *(f"✓ {each.title}" for each in plan.done)]
    if plan.remaining:
        lines += ["Remaining:", *(f"- {each.title} ({each.status})" for each in plan.remaining)]
    return "\n".join(lines)


@dataclass(frozen=True, init=False)
class Prompt:
    """Instructions in sections: `Prompt(Section("Objective", "Review $repository."), Progress())`.

    They are rendered before every step, and always in the same way: a session that goes on after a crash shows the
    model what one shows that was never interrupted. `$name` stands for a field of the request of `Sessions.execute`.
    A plain text is a section without a title.
    """

    sections: tuple["Section | Progress | str", ...] = field(default=())
    visibility: Visibility = "full"

    def __init__(self, *sections: "Section | Progress | str", visibility: Visibility = "full") -> None:
        if visibility not in ("full", "summary"):
            raise InvalidDeclaration(f"The visibility of a prompt is 'full' or 'summary'; not {visibility!r}.")
        for each in cast("Iterable[object]", sections):
            if not isinstance(each, Section | Progress | str):
                raise InvalidDeclaration(
                    f"A prompt consists of sections: `Prompt(Section('Task', '…'))`; not {each!r}."
                )
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "visibility", visibility)

    async def rendered(self, session: SessionView) -> str:
        """The instructions as they are now."""
        texts = [
            each if isinstance(each, str) else await each.rendered(session, self.visibility) for each in self.sections
        ]
        return "\n\n".join(text for text in texts if text)
