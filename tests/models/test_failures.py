import pytest
from pydantic_ai.exceptions import ModelHTTPError, ModelQuotaExceededError

from perdure.models.failures import failure, public


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


def test_a_long_message_is_cut() -> None:
    assert len(public("word " * 1000)) == 300
