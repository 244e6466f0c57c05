"""`ask_question`: the model asks people, and the turn waits for the answer."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_ai.tools import ToolDefinition

from perdure.protocol.inputs import InputAnswer, Option
from perdure.protocol.wire import JsonObject

from .journal import Outcome
from .toolbox import InvalidArguments, misfit

ASK_QUESTION = "ask_question"


class _Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1)
    label: str = Field(min_length=1)


class Question(BaseModel):
    """What the model may say when it asks."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    prompt: str = Field(min_length=1, description="The question, as the user will read it.")
    options: list[str | _Choice] = Field(default=[], description="Answers to choose from; none: the answer is text.")
    allow_freeform: bool = Field(default=False, description="Whether an answer beside the options may be written.")

    @property
    def shown(self) -> JsonObject:
        choices = [_Choice(id=each, label=each) if isinstance(each, str) else each for each in self.options]
        return {
            "prompt": self.prompt,
            "display": "select" if choices else "text",
            "allow_freeform": self.allow_freeform or not choices,
            "options": tuple(Option(id=each.id, label=each.label) for each in choices),
        }


DEFINITION = ToolDefinition(
    name=ASK_QUESTION,
    description="Ask the user a question, and wait for the answer before you go on.",
    parameters_json_schema=Question.model_json_schema(by_alias=True),
)


def read_question(arguments: JsonObject) -> Question:
    try:
        question = Question.model_validate(arguments)
    except ValidationError as invalid:
        raise misfit(ASK_QUESTION, invalid) from None
    ids = [option.id for option in question.shown["options"]]
    if len(ids) != len(set(ids)) or "" in ids:
        raise InvalidArguments(f"Invalid arguments for {ASK_QUESTION}: options: each needs an id of its own")
    return question


def answered(answer: InputAnswer) -> Outcome:
    said: dict[str, Any] = {"optionId": answer.option_id, "text": answer.text, "status": "answered"}
    return Outcome(status="completed", output={key: value for key, value in said.items() if value is not None})


def ignored() -> Outcome:
    return Outcome(status="completed", output={"status": "ignored"})
