"""The loop of a chat: what is typed is sent, what comes is shown, what is asked is answered."""

import shlex
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perdure.bounds import printable
from perdure.client import Client, ClientError, Event, Session
from perdure.client.events import BOUNDARIES

from .answers import Edit, Json, Question, Unclear, object_of, read_answer, read_arguments
from .screen import Lines, Screen
from .view import TurnView, call_line, outcome

_HELP = """/help      this list
/cancel    withdraw what the session waits for (Ctrl-C stops a turn while it runs)
/answer    answer what is open
/wait      watch until others have answered and it has gone on (Ctrl-C stops watching)
/usage     what the session has used
/session   its id, and the command that comes back to it
/quit      leave; the session stays"""

#: Events of the history that is shown, for each message.
_SHARE = 6
_HISTORY = "message.received,message.completed,action.result"
#: The exit code of a program that was interrupted, as shells have it.
INTERRUPTED = 130


class Left(Exception):
    """The person has left."""


#: Seconds without an event after which somebody wonders.
_LONG = 8.0
#: What a session does when all is well: a model thinks, a tool works, people are asked.
_WELL = ("message", "input", "children", "working", "ended")


@dataclass
class Shown:
    """A turn that is shown, and what is needed to stop it."""

    view: TurnView
    #: When something has happened last.
    heard: float = field(default_factory=time.monotonic)
    delivery_id: str | None = None
    #: Set when the message is accepted, or was refused: before that there is nothing to stop.
    sent: threading.Event = field(default_factory=threading.Event)
    accepted: bool = False
    #: Whether a turn has read the message. Until then what is shown is of others.
    read: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def accept(self, delivery_id: str | None) -> None:
        self.delivery_id, self.view.own, self.accepted = delivery_id, delivery_id, True
        self.sent.set()


class Chat:
    """One chat in a terminal."""

    def __init__(
        self,
        client: Client,
        screen: Screen,
        lines: Lines,
        *,
        agent: str | None,
        come_back: Sequence[str],
        farewell: str,
    ) -> None:
        self._client = client
        self._screen = screen
        self._lines = lines
        self._session: Session = client.session(agent=agent)
        self._come_back = come_back
        self._farewell = farewell
        self._open: list[Question] = []
        self._has_failed = False

    def run(self) -> int:
        """Until the person leaves; the exit code."""
        code = 0
        try:
            if self._open:
                self._do("/answer")
            while (line := self._line("> ")) is not None:
                self._do(line)
        except Left:
            pass
        except KeyboardInterrupt:
            code = INTERRUPTED
        self._screen.fresh()
        if self._lines.live and self._session.id is not None:
            self._screen.line(f"{self._farewell} {self._command()}", "dim")
        return code or int(self._has_failed and not self._lines.live)

    # --- a session that was there before --------------------------------------------------------------------

    def resume(self, session_id: str, messages: int) -> bool:
        """Show the last messages of a session and what it does now; False when it has ended."""
        boundaries = ",".join(sorted(BOUNDARIES))
        last = self._client.events(session_id, types=boundaries, order="desc", limit=1).events
        start = (last[0].index or 0) + 1 if last else 0
        # After the boundary: of a session that runs now, the next one is still to be read.
        shown = self._client.show(session_id)
        self._show_history(session_id, start, messages)
        if shown["status"] in ("completed", "failed"):
            self._screen.line("This session has ended. `perdure chat` starts another one.")
            return False
        self._session = self._client.session({"sessionId": session_id, "streamIndex": start})
        if attention := shown.get("attention"):
            self._screen.line(f"{attention.get('code')}: {attention.get('message')}", "red")
        elif shown["status"] in ("running", "starting"):
            with self._interrupts() as shown_turn:
                shown_turn.accept(None)
                self._follow(self._until_boundary(start), shown_turn)
            self._open = [Question.of(each) for each in shown_turn.view.draft.requests.values()]
        else:
            self._open = [Question.of(self._client.input(each)) for each in self._asked(session_id, shown)]
        return True

    def _asked(self, session_id: str, shown: Json) -> Sequence[str]:
        """The open requests of the session, and of those that it has started where the API tells of them."""
        try:
            details: Json = self._client.why(session_id).get("details") or {}
        except ClientError:
            details = {}
        return [str(each) for each in details.get("inputs") or shown["openInputs"]]

    def _show_history(self, session_id: str, end: int, messages: int) -> None:
        wanted = {"types": _HISTORY, "order": "desc", "limit": min(1000, _SHARE * messages)}
        found = list(self._client.events(session_id, before=end, **wanted).events)[::-1] if messages else []
        begins = [place for place, event in enumerate(found) if event.type == "message.received"]
        for event in found[begins[-messages] if len(begins) > messages else 0 :]:
            match event.type:
                case "message.received":
                    self._screen.line(f"> {event.data.get('message')}", "bold")
                case "message.completed":
                    self._screen.line(str(event.data.get("message") or ""))
                case _:
                    self._screen.line(f"{call_line(object_of(event.data.get('result')))}: {outcome(event)}", "dim")

    def _until_boundary(self, start: int) -> Iterator[Event]:
        for event in self._session.events(start):
            yield event
            if event.type in BOUNDARIES:
                return

    # --- what is typed --------------------------------------------------------------------------------------

    def _line(self, prompt: str, *, begun: str = "") -> str | None:
        """The next line. An interrupt drops what was typed, and a second one in a row leaves."""
        for last in (False, True):
            try:
                return self._lines.read(prompt, begun=begun)
            except KeyboardInterrupt:
                self._screen.line("")
                if last or not self._lines.live:
                    raise
                self._screen.line("(Ctrl-C again, or /quit, leaves.)", "dim")
        return None

    def _do(self, line: str) -> None:
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: self._screen.line(_HELP),
            "/cancel": self._cancel,
            "/answer": self._ask,
            "/wait": self._wait,
            "/usage": self._usage,
            "/session": self._show_session,
            "/quit": _leave,
        }
        word = line.strip()
        try:
            if word in commands:
                commands[word]()
            elif word.startswith("/") and word[1:].isalpha():
                self._screen.line(f"There is no command {word}. /help lists them.", "yellow")
            elif word and self._is_free():
                self._turn(message=line)
                self._ask()
        except ClientError as error:
            self._has_failed = True
            self._screen.line(refusal(error), "red")

    def _is_free(self) -> bool:
        """Whether the next message would be read: while something is open, messages wait."""
        self._open = self._still_open()
        if self._open:
            self._screen.line(
                "The session waits for an answer: /answer gives it, /wait waits for others, /cancel withdraws it."
            )
        return not self._open

    def _still_open(self) -> list[Question]:
        """Those that nobody has answered meanwhile. One that is not there any more is not open."""
        found: list[Question] = []
        for each in self._open:
            try:
                if self._client.input(each.request_id)["status"] == "open":
                    found.append(each)
            except ClientError as error:
                if error.status != 404:
                    raise
        return found

    # --- turns ----------------------------------------------------------------------------------------------

    def _turn(self, message: str | None = None, answers: Sequence[Json] = ()) -> bool:
        """Send something, and show what comes of it; False when nothing comes before others have agreed."""
        with self._interrupts() as shown:
            turn = self._session.send(message, input_responses=answers)
            shown.accept(turn.delivery_id)
            self._follow(turn, shown)
        result = turn.result()
        self._has_failed |= result.status in ("failed", "refused")
        if result.boundary is None:
            self._screen.line("Others must agree before it goes on.", "dim")
            return False
        self._open = [Question.of(each) for each in result.input_requests]
        return True

    def _follow(self, events: Iterable[Event], shown: Shown) -> None:
        view, last = shown.view, None
        for event in events:
            shown.heard = time.monotonic()
            shown.read |= shown.delivery_id in event.delivery_ids
            view.show(event)
            last = event
        if last is not None:
            view.usage(last)

    @contextmanager
    def _interrupts(self) -> Generator[Shown]:
        """While something is sent and its turn is shown, an interrupt stops it, and a second one leaves."""
        shown, count = Shown(TurnView(self._screen)), 0

        def interrupt(_: int, __: Any) -> None:
            nonlocal count
            count += 1
            if count > 1:
                raise KeyboardInterrupt
            # Not here: the signal may have come in the middle of a write.
            threading.Thread(target=self._stop, args=(shown,), daemon=True).start()

        threading.Thread(target=self._wonder, args=(shown,), daemon=True).start()
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield shown
        finally:
            signal.signal(signal.SIGINT, before)
            shown.sent.set()
            shown.over.set()

    def _wonder(self, shown: Shown) -> None:
        """Say why nothing happens, once in each silence, unless all is well."""
        told = 0.0
        while not shown.over.wait(1.0):
            if time.monotonic() - shown.heard < _LONG or told == shown.heard:
                continue
            told = shown.heard
            sentence = self._why(shown)
            if sentence and not shown.over.is_set():
                self._screen.line(sentence, "yellow")

    def _why(self, shown: Shown) -> str | None:
        try:
            self._client.health()
            if shown.accepted and self._session.id is not None:
                why = self._client.why(self._session.id)
                return None if why.get("code") in _WELL else printable(str(why.get("sentence")))
        except ClientError:
            # Streams tell of it themselves; an older API does not know why.
            return None if shown.accepted else "The API is away; it is tried again."
        return None

    def _stop(self, shown: Shown) -> None:
        """Stop the turn; if none has read the message yet, take the message back."""
        self._screen.line("Cancelling. (Ctrl-C again leaves; the session goes on.)", "dim")
        shown.sent.wait()
        if not shown.accepted:
            return
        unread = None if shown.read else shown.delivery_id
        try:
            if unread is not None and self._is_taken_back(unread):
                return
            # The turn that is shown may be one before ours.
            turn_id = shown.view.draft.turn_id if unread is None else None
            self._client.cancel(self._session.id or "", turn_id)
        except ClientError as error:
            self._screen.line(refusal(error), "red")

    def _is_taken_back(self, delivery_id: str) -> bool:
        """Take a message back; False when a turn has it by now, and for answers, which count at once."""
        try:
            self._client.withdraw(delivery_id)
        except ClientError as error:
            if error.status in (404, 405, 409):
                return False
            raise
        return True

    # --- answers --------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Have everything answered that is open, until something is left for later."""
        while self._open:
            answers: list[Json] = []
            # With the token all answers are one turn; without it each of them is one.
            asked = self._open if "continuationToken" in self._session.state else self._open[:1]
            for question in asked:
                answer = self._answer(question)
                if answer is None:
                    return
                answers.append(answer)
            try:
                if not self._turn(answers=answers):
                    return
            except ClientError as error:
                self._screen.line(refusal(error), "red")
                if error.status != 400:
                    self._open = self._still_open()
                    return

    def _answer(self, question: Question) -> Json | None:
        """The answer to one request; None when it is left for later."""
        self._screen.fresh()
        for number, line in enumerate(question.lines()):
            self._screen.line(line, "" if number else "bold")
        while (typed := self._line("answer> ")) is not None:
            match typed.strip():
                case "/later":
                    return None
                case "/quit":
                    _leave()
                case "/cancel":
                    self._cancel()
                    return None
                case _:
                    pass
            found = read_answer(question, typed)
            if isinstance(found, Edit) or (isinstance(found, dict) and "arguments" in found):
                found = self._edited(question, found)
            if isinstance(found, dict):
                return found
            if isinstance(found, Unclear):
                self._screen.line(found.why, "yellow")
        return None

    def _edited(self, question: Question, found: Edit | Json) -> Json | Unclear | Edit:
        """The arguments, typed or still to be typed, after a comparison with what the tool takes."""
        import json

        given = found["arguments"] if isinstance(found, dict) else question.arguments
        text = json.dumps(given, ensure_ascii=False)
        if isinstance(found, Edit):
            # The line editor shows it as it is. In JSON an escaped character is the same one.
            typed = self._line("arguments> ", begun=printable(text))
            if typed is None:
                return found
            text = typed
        return read_arguments(question, text, self._schema(question))

    def _schema(self, question: Question) -> Json | None:
        """What the arguments of the tool must be; None where the API does not show it. It checks them, too."""
        try:
            agent = self._client.input(question.request_id).get("agent")
            tools: list[Json] = self._client.info(agent)["tools"]["available"]
        except (ClientError, KeyError, TypeError):
            return None
        return next((each.get("inputSchema") for each in tools if each.get("name") == question.tool), None)

    # --- commands -------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        if self._session.id is None:
            self._screen.line("There is nothing to cancel.")
            return
        if self._client.cancel(self._session.id) == "no_active_turn":
            self._screen.line("There is nothing to cancel.")
            return
        self._open = []
        view = TurnView(self._screen)
        for event in self._until_boundary(int(self._session.state["streamIndex"])):
            view.show(event)

    def _wait(self) -> None:
        """Show what comes, up to the next boundary. An interrupt ends the watching alone."""
        if self._session.id is None:
            self._screen.line("The session has not begun.")
            return
        view = TurnView(self._screen)
        try:
            for event in self._until_boundary(int(self._session.state["streamIndex"])):
                view.show(event)
        except KeyboardInterrupt:
            self._screen.line("")
            return
        self._open = [Question.of(each) for each in view.draft.requests.values()]
        self._ask()

    def _usage(self) -> None:
        if self._session.id is None:
            self._screen.line("The session has not begun.")
            return
        shown = self._client.show(self._session.id)
        counts: Json = {**shown["counts"], **shown["usage"]}
        self._screen.line(", ".join(f"{count:,} {_in_words(name)}" for name, count in counts.items()))

    def _show_session(self) -> None:
        self._screen.line(self._command() if self._session.id else "The session has not begun.")

    def _command(self) -> str:
        return shlex.join(["perdure", "chat", "--session", self._session.id or "", *self._come_back])


def refusal(error: ClientError) -> str:
    """What went wrong, as one sentence."""
    if error.status is None and error.passing:
        return f"{error.message}. It is not known whether it was accepted." if error.key else f"{error.message}."
    return str(error)


def _in_words(name: str) -> str:
    """`toolCalls` as people write it."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)


def _leave() -> None:
    raise Left
