import pytest
from pydantic_ai.exceptions import ModelHTTPError, ModelQuotaExceededError

from perdure.bounds import public
from perdure.models.base import failure


@pytest.mark.parametrize(
    "text",
    [
        "Incorrect API key provided: sk-proj-abcdef123456",
        "Authorization: Bearer abc.def",
        "GET https://x.test/?key=abcdef failed",
        "token eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9eyJzdWIiOiIxMjM0NTY3ODkwIn0 expired",
    ],
)
def test_what_looks_like_a_secret_is_not_shown(text: str) -> None:
    shown = public(text)

    assert not any(secret in shown for secret in ("abcdef", "abc.def", "eyJ"))


def test_neither_headers_nor_the_body_of_a_refused_key_are_shown() -> None:
    error = ModelHTTPError(401, "m", {"message": "the key hunter2 is wrong"}, headers={"set-cookie": "hunter2"})

    failed = failure("openai:m", error)

    assert failed.message == "The model openai:m answered 401."


def test_the_text_of_a_provider_is_the_reason_and_no_part_of_the_message() -> None:
    failed = failure("openai:m", ModelHTTPError(400, "m", {"error": {"message": "Too\nlong for sk-abcdef123456."}}))

    assert (failed.message, failed.reason) == ("The model openai:m answered 400.", "Too long for [redacted]")


def test_an_empty_account_is_not_worth_waiting_for() -> None:
    error = ModelHTTPError.for_category(ModelQuotaExceededError, status_code=429, model_name="m")

    assert not failure("openai:m", error).transient


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "This model's maximum context length is 128000 tokens, however you requested 130000 tokens"),
        (400, "prompt is too long: 212193 tokens > 200000 maximum"),
        (400, "Input is too long for requested model."),
        (
            400,
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000; the context window is full",
        ),
        (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
        (400, "Please reduce the length of the messages or completion."),
        (422, "Prompt contains 40000 tokens, too large for model with 32768 maximum context length"),
        (413, "Request exceeds the maximum size"),
    ],
)
def test_a_request_that_is_too_long_is_recognised(status: int, text: str) -> None:
    failed = failure("m", ModelHTTPError(status, "m", {"error": {"message": text}}))

    assert failed.too_long
    assert not failed.transient


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "Invalid parameter: temperature"),
        (429, "Request too large: limit 30000 tokens per minute. The input is too long; reduce the length of it."),
        (500, "context length"),
    ],
)
def test_other_refusals_are_not(status: int, text: str) -> None:
    assert not failure("m", ModelHTTPError(status, "m", {"error": {"message": text}})).too_long


def test_a_long_message_is_cut() -> None:
    assert len(public("word " * 1000)) == 300
