"""The events of a turn, as a person reads them."""

import json
from datetime import datetime
from typing import Any

from perdure.bounds import printable, shortened
from perdure.client import Draft, Event
from perdure.client.events import BOUNDARIES

from .answers import object_of
from .screen import Screen

Json = dict[str, Any]

_ARGUMENTS = 80
_OUTCOME = 80

#: The events with a text: what it is, and whether it is all of it.
_TEXTS = {
    "reasoning.appended": ("reasoning", False),
    "reasoning.completed": ("reasoning", True),
    "message.appended": ("text", False),
    "message.completed": ("text", True),
}


class TurnView:
    """Shows one turn. A text that is said again after a worker has died is not shown again."""

    def __init__(self, screen: Screen) -> None:
        #: The delivery that was typed here, and need not be shown.
        self.own: str | None = None
        self._screen = screen
        self._draft = Draft()
        # What is on the screen of the step that speaks.
        self._shown = {"text": "", "reasoning": ""}
        self._speaking = ""
        # The calls that run: what is shown of each, and when it began.
        self._calls: dict[str, tuple[str, str]] = {}
        # The call at the end of whose line the screen is, and how much was written by then.
        self._open = ("", -1)
        self._began = ""

    @property
    def draft(self) -> Draft:
        return self._draft

    def show(self, event: Event) -> None:
        """Show the next event."""
        self._began = self._began or event.at
        self._draft.add(event)
        if event.type in _TEXTS:
            self._speak(*_TEXTS[event.type])
            return
        self._act(event)
        self._tell(event)

    def usage(self, event: Event) -> None:
        """The line below a turn: what it has used, and how long it took."""
        used = self._draft.usage
        counts = (
            [f"{used.get(f'{name}_tokens', 0):,.0f} tokens {name[:-3]}" for name in ("input", "output")] if used else []
        )
        cost = used.get("cost_usd")
        taken = _seconds(self._began, event.at)
        parts = [*counts, *([] if cost is None else [f"${cost:.4f}"]), *([taken] if taken else [])]
        self._screen.line(" · ".join(parts), "dim")

    # --- texts ----------------------------------------------------------------------------------------------

    def _speak(self, kind: str, whole: bool) -> None:
        now = self._draft.text if kind == "text" else self._draft.reasoning
        shown = self._shown[kind]
        if now.startswith(shown):
            self._go_on(kind, now[len(shown) :])
        elif whole or not shown.startswith(now):
            # The next worker says something else. What is on the screen cannot be taken back.
            self._screen.line("The reply was interrupted; this is another one:", "dim")
            self._shown = {"text": "", "reasoning": ""}
            self._go_on(kind, now)
        if whole:
            self._screen.fresh()
            self._speaking = ""

    def _go_on(self, kind: str, more: str) -> None:
        if not more:
            return
        if self._speaking != kind:
            self._screen.fresh()
            self._speaking = kind
        self._screen.write(more, "dim" if kind == "reasoning" else "")
        self._shown[kind] += more

    # --- calls ----------------------------------------------------------------------------------------------

    def _act(self, event: Event) -> None:
        match event.type:
            case "step.started":
                self._shown, self._speaking = {"text": "", "reasoning": ""}, ""
            case "actions.requested":
                for action in self._draft.calls.values():
                    if action.get("callId") not in self._calls:
                        self._begin(action, event)
            case "action.result":
                self._end(event)
            case _:
                pass

    def _begin(self, action: Json, event: Event) -> None:
        call_id = str(action.get("callId"))
        shown = call_line(action)
        self._calls[call_id] = (shown, event.at)
        self._screen.fresh()
        self._screen.write(f"{shown} …", "dim")
        self._open = (call_id, self._screen.writes)

    def _end(self, event: Event) -> None:
        result = object_of(event.data.get("result"))
        call_id = str(result.get("callId"))
        shown, began = self._calls.pop(call_id, (call_line(result), ""))
        taken = _seconds(began, event.at)
        said = f"{outcome(event)}{f' ({taken})' if taken else ''}"
        style = "" if event.data.get("status") == "completed" else "yellow"
        if self._open == (call_id, self._screen.writes):
            self._screen.write(f" {said}", style or "dim")
            self._screen.fresh()
        else:
            self._screen.line(f"{shown}: {said}", style or "dim")

    # --- everything else ------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        data = event.data
        match event.type:
            case "message.received" if self.own not in event.delivery_ids:
                self._screen.line(f"> {data.get('message')}", "bold")
            case "result.completed":
                self._screen.line(json.dumps(data.get("result"), ensure_ascii=False, indent=2))
            case "turn.failed" | "session.failed" | "session.attention":
                self._screen.line(printable(f"{data.get('code')}: {data.get('message')}"), "red")
            case "turn.cancelled":
                self._screen.line("Cancelled.", "yellow")
            case "subagent.called":
                self._screen.line(printable(f"  {data.get('name')} works in {data.get('childSessionId')}"), "dim")
            case "delivery.refused":
                self._screen.line(printable(f"Refused: {data.get('message')}"), "yellow")
            case "compaction.completed":
                self._screen.line("The history was summarised.", "dim")
            case "session.completed":
                self._screen.line("The session has ended; the next message starts another one.", "dim")
            case "session.recovered":
                self._screen.line("It goes on.", "dim")
            case _ if event.type in BOUNDARIES:
                self._screen.fresh()
            case _:
                pass


def call_line(action: Json) -> str:
    """A call on one line: its name and the beginning of its arguments."""
    name = next((action[each] for each in ("toolName", "name", "subagentName") if action.get(each)), "a tool")
    given = action.get("input")
    return printable(f"  {name}{'' if given is None else f' {short(given, _ARGUMENTS)}'}")


def outcome(event: Event) -> str:
    """What came of a call, in a few words."""
    error = object_of(event.data.get("error"))
    match event.data.get("status"):
        case "completed":
            result = object_of(event.data.get("result"))
            return short(result.get("output"), _OUTCOME)
        case "rejected" if error.get("code") == "TOOL_EXECUTION_DENIED":
            return "denied"
        case status:
            return printable(shortened(f"{status}: {error.get('message') or ''}", _OUTCOME))


def short(value: Any, longest: int) -> str:
    """A value on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(shortened(" ".join(text[: 4 * longest].split()), longest))


def _seconds(began: str, ended: str) -> str:
    """The time between two events."""
    try:
        taken = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    except ValueError:
        return ""
    return f"{max(0.0, taken):.1f} s"
