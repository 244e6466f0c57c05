"""The labels of metrics: few, short, and of nothing that grows."""

from collections.abc import Generator

import pytest
from opentelemetry.trace import INVALID_SPAN

from perdure.protocol.deliveries import LOCAL
from perdure.protocol.requests import Coordinates
from perdure.telemetry import names, spans
from perdure.telemetry.spans import Choices, ModelSpan, Spanned, Work

_WORK = Work(Coordinates(session_id="ses_1", turn=0), "boss", 1, "ses_1", LOCAL)


@pytest.fixture(autouse=True)
def fresh() -> Generator[None]:
    spans.choose(Choices())
    yield
    spans.choose(Choices())


def test_a_label_has_a_bounded_number_of_values() -> None:
    seen = {
        str(spans.chosen().bounded({names.RESPONSE_MODEL: f"model-{n}"})[names.RESPONSE_MODEL]) for n in range(5_000)
    }

    assert len(seen) == 201
    assert "_OTHER" in seen
    # What is known stays what it is, and so do other labels.
    assert spans.chosen().bounded({names.RESPONSE_MODEL: "model-0", names.AGENT: "boss"}) == {
        names.RESPONSE_MODEL: "model-0",
        names.AGENT: "boss",
    }


def test_what_a_provider_calls_itself_is_cut() -> None:
    span = ModelSpan(Spanned(INVALID_SPAN, {}))

    span.replied("m" * 100_000, "half \ud800" + "r" * 100_000, "stop")

    assert all(len(str(span.attributes[name])) <= 200 for name in (names.RESPONSE_MODEL, names.RESPONSE_ID))
    # Half a character cannot be exported, and would take the other spans of its batch with it.
    assert "\ud800" not in str(span.attributes[names.RESPONSE_ID])


def test_providers_have_the_names_of_the_conventions() -> None:
    named = {
        "openai-responses:gpt": ("openai", "gpt"),
        "google-gla:gemini": ("gcp.gemini", "gemini"),
        "bedrock:us.amazon.nova:0": ("aws.bedrock", "us.amazon.nova:0"),
        "own:model": ("own", "model"),
        "demo": ("demo", "demo"),
    }
    found: dict[str, tuple[object, object]] = {}

    for model in named:
        with spans.model_call(_WORK, model) as span:
            found[model] = span.attributes[names.PROVIDER], span.attributes[names.REQUEST_MODEL]

    assert found == named
