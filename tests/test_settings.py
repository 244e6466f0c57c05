"""What is said of settings before they count."""

import pytest
from pydantic import ValidationError

from perdure.errors import Invalid
from perdure.settings import Settings, misspelt, read_settings


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PERDURE_AGENT", "PERDURE_AGENTS"),
        ("PERDURE_APIKEYS", "PERDURE_API_KEYS"),
        ("PERDURE_MODLE", "PERDURE_MODEL"),
        ("perdure_db_url", "PERDURE_DATABASE_URL"),
    ],
)
def test_a_name_that_is_almost_a_setting_is_noticed(variable: str, meant: str) -> None:
    assert misspelt([variable]) == [f"{variable} is not a setting, and changes nothing; {meant} is one."]


def test_settings_and_the_names_of_others_are_left_alone() -> None:
    names = ["PERDURE_MODEL", "perdure_port", "PERDURE_READY_FILE", "PERDURE_TEMPORAL_BIN", "PERDURE_OWNER", "PATH"]

    assert misspelt(names) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heartbeat_timeout", "0"),
        ("heartbeat_timeout", "inf"),
        ("model_silence", "inf"),
        ("max_tool_output_bytes", "-1"),
        ("max_body_bytes", "0"),
        ("cached_sessions", "0"),
        ("port", "65536"),
    ],
)
def test_numbers_with_which_nothing_would_work_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PERDURE_{name.upper()}", value)

    with pytest.raises(ValidationError, match=name):
        Settings()


@pytest.mark.parametrize("address", ["", ":7233", "temporal:port", "temporal:99999", "two words:7233", "::1:7233"])
def test_an_address_that_is_none_is_refused_in_a_sentence(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_TEMPORAL_ADDRESS", address)

    with pytest.raises(Invalid, match=r"^PERDURE_TEMPORAL_ADDRESS: An address is HOST:PORT, 127.0.0.1:7233 for one.$"):
        read_settings()


@pytest.mark.parametrize("address", ["localhost:7233", "temporal", "[::1]:7233", "a-b.example.com:443"])
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert Settings(temporal_address=address).temporal_address == address


def test_a_deployment_without_a_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_DEPLOYMENT", "")
    monkeypatch.setenv("PERDURE_BUILD_ID", "")

    assert (Settings().deployment, Settings().build_id) == (None, None)
