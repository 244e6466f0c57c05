"""What is said of settings before they count."""

import pytest
from pydantic import ValidationError

from perdure.settings import Settings, misspelt


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
    ],
)
def test_numbers_with_which_nothing_would_work_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PERDURE_{name.upper()}", value)

    with pytest.raises(ValidationError, match=name):
        Settings()
