"""What the mode of a message makes of it, and the order of what waits."""

import pytest

from perdure.protocol.deliveries import QUEUE_MODES
from perdure.session.queue import between, read_mode


@pytest.mark.parametrize("name", QUEUE_MODES)
def test_each_mode_is_read_by_its_name(name: str) -> None:
    assert read_mode(name) == name


def test_steer_backlog_is_another_name_of_followup() -> None:
    assert read_mode("steer_backlog") == "followup"


@pytest.mark.parametrize("name", [None, "", "Followup", "soon", 3, ["followup"]])
def test_what_names_no_mode_is_none(name: object) -> None:
    assert read_mode(name) is None


@pytest.mark.parametrize("high", ["2026-11-20T08:00:00.000Z", None])
def test_a_delivery_can_be_moved_before_another_one_any_number_of_times(high: str | None) -> None:
    low = ""
    for _ in range(50):
        key = between(low, high)

        assert low < key
        assert high is None or key < high
        high = key


def test_a_delivery_can_be_moved_behind_another_one_any_number_of_times() -> None:
    low, high = "2026-11-20T08:00:00.000Z", "2026-11-20T08:00:00.001Z"
    for _ in range(50):
        key = between(low, high)

        assert low < key < high
        low = key
