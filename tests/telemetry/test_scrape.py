"""Metrics for Prometheus: who gets them, what they are, and that their number does not grow with the sessions."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure.telemetry.scrape import Scrape
from tests.support.plugin import StackFactory
from tests.support.processes import free_port, wait_until
from tests.support.stack import Stack
from tests.support.waiting import until
from tests.telemetry.observed import KEYS, api_keys

DASHBOARD = Path(__file__).parents[2] / "deploy" / "telemetry" / "grafana" / "perdure.json"
AGENTS = "tests.telemetry.agents:agents"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def series(text: str) -> Series:
    """Every number by its name and its labels."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def read(url: str, headers: dict[str, str] | None = None) -> httpx2.Response:
    return httpx2.get(f"{url}/metrics", headers=headers, verify=False, timeout=30)


def names_in(found: Series) -> set[str]:
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return [free_port(), free_port()]


@pytest.fixture(scope="module")
def scraped(module_stack: StackFactory, ports: list[int]) -> Stack:
    """A worker with a listener of its own, and an API with the route and a listener."""
    stack = module_stack(agents=AGENTS, provider=True, workers=0, apis=0)
    stack.start_worker({"PERDURE_METRICS_PORT": str(ports[0])})
    stack.start_api({"PERDURE_METRICS": "on", "PERDURE_METRICS_PORT": str(ports[1])})
    return stack


async def test_prometheus_reads_the_worker_and_the_api(scraped: Stack, ports: list[int]) -> None:
    async with scraped.talk() as talk:
        await talk.say('call add {"a": 1, "b": 2}')

    expected = {
        "gen_ai_client_inference_duration_seconds_count",
        "gen_ai_client_inference_usage_input_tokens_total",
        "gen_ai_execute_tool_duration_seconds_count",
        "gen_ai_invoke_agent_duration_seconds_count",
        "perdure_turns_total",
        "perdure_event_loop_lag_seconds_bucket",
    }
    worker = f"http://127.0.0.1:{ports[0]}"
    wait_until(lambda: expected <= names_in(series(read(worker).text)), "the metrics of the worker")
    wait_until(lambda: "perdure_sessions" in read(scraped.url).text, "the gauges of the API")
    api = series(read(scraped.url).text)
    assert {"http_server_request_duration_seconds_count", "perdure_inputs_open", "perdure_deliveries_waiting"} <= (
        names_in(api)
    )
    assert names_in(series(read(f"http://127.0.0.1:{ports[1]}").text)) == names_in(api)


async def test_the_gauges_say_what_waits(scraped: Stack) -> None:
    async with scraped.talk() as talk:
        await talk.create('call pay {"amount": 5}')
        await talk.until_boundary()

    waiting = ("perdure_sessions", (("otel_scope_name", "perdure"), ("perdure_status", "waiting")))

    def counted() -> bool:
        found = series(read(scraped.url).text)
        inputs = [value for (name, _), value in found.items() if name == "perdure_inputs_open"]
        waits = [value for (name, labels), value in found.items() if name == waiting[0] and waiting[1][1] in labels]
        return any(waits) and any(inputs)

    wait_until(counted, "a session that waits for people")


@pytest.mark.slow
async def test_the_number_of_series_does_not_grow_with_the_sessions(scraped: Stack, ports: list[int]) -> None:
    async def converse(count: int) -> None:
        for _ in range(count):
            async with scraped.talk() as talk:
                await talk.say('call add {"a": 1, "b": 2} then say Hello')

    def shape() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        texts: Iterable[str] = (read(f"http://127.0.0.1:{port}").text for port in ports)
        return {key for text in texts for key in series(text)}

    await converse(2)
    wait_until(lambda: any(name == "perdure_sessions" for name, _ in shape()), "the gauges of the API")
    before = shape()
    await asyncio.gather(*(converse(25) for _ in range(8)))

    assert shape() - before == set()


def shown_metrics() -> set[str]:
    """The metrics in the queries of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    without_labels = [re.sub(r"by \([^)]*\)|\{[^}]*\}", "", query) for query in queries]
    return {name for query in without_labels for name in re.findall(r"\b(?:perdure|gen_ai|http)_\w+", query)}


def shown_labels() -> set[str]:
    """The labels by which the dashboard groups."""
    groups = re.findall(r"by \(([^)]*)\)", DASHBOARD.read_text())
    return {label.strip() for group in groups for label in group.split(",")}


async def test_the_dashboard_shows_metrics_and_labels_that_exist(scraped: Stack, ports: list[int]) -> None:
    async with scraped.talk() as talk:
        await talk.say('call add {"a": 1, "b": 2} then say Hello')
    async with scraped.talk() as talk:
        await talk.create("fail 400")
        await talk.until_boundary()

    def emitted() -> Series:
        return {key: value for port in ports for key, value in series(read(f"http://127.0.0.1:{port}").text).items()}

    assert len(shown_metrics()) > 15
    wait_until(lambda: not shown_metrics() - names_in(emitted()), f"{shown_metrics() - names_in(emitted())}")
    labels = {label for _, pairs in emitted() for label, _ in pairs}
    # `instance` is Prometheus' own name of a process.
    assert shown_labels() - labels - {"instance"} == set()


def test_a_listener_serves_metrics_and_nothing_else(scraped: Stack, ports: list[int]) -> None:
    response = httpx2.get(f"http://127.0.0.1:{ports[0]}/v1/sessions", verify=False)

    assert response.status_code == 404


def test_a_reader_that_never_ends_its_request_does_not_keep_the_others_out() -> None:
    port = free_port()
    listener = Scrape().listen("127.0.0.1", port)
    assert listener is not None
    gone = threading.Event()
    slow = socket.create_connection(("127.0.0.1", port))

    def drip() -> None:
        # A byte a second: the connection is never silent for long.
        while not gone.wait(1):
            try:
                slow.send(b"G")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert httpx2.get(f"http://127.0.0.1:{port}/metrics", verify=False, timeout=20).status_code == 200
    finally:
        gone.set()
        dripping.join()
        slow.close()
        listener.close()


async def test_only_operators_read_metrics_of_an_api_with_keys(make_stack: StackFactory) -> None:
    stack = make_stack(workers=0, environment={"PERDURE_METRICS": "on", "PERDURE_API_KEYS": api_keys()})

    assert read(stack.url).status_code == 401
    assert read(stack.url, bearer("ada")).status_code == 403
    assert read(stack.url, bearer("olga")).status_code == 200


async def test_a_proxy_on_this_machine_gets_no_metrics(scraped: Stack) -> None:
    assert read(scraped.url, {"x-forwarded-for": "203.0.113.7"}).status_code == 401


async def test_without_the_setting_there_are_no_metrics(make_stack: StackFactory) -> None:
    stack = make_stack(workers=0)

    assert read(stack.url).status_code == 404


async def test_a_port_that_is_taken_does_not_keep_a_worker_from_its_work(make_stack: StackFactory) -> None:
    stack = make_stack(environment={"PERDURE_METRICS_PORT": str(free_port())})

    async with stack.talk() as talk:
        assert await talk.say("hello")
    outputs = [output for _, output in stack.logs()]
    assert sum("no metrics are served at 127.0.0.1 port" in output for output in outputs) == 1


async def test_a_turn_is_not_measured_again_when_its_workflow_is_replayed(make_stack: StackFactory) -> None:
    first, second = free_port(), free_port()
    stack = make_stack(agents=AGENTS, provider=True, workers=0, environment={"PERDURE_TURNS": "inline"})
    stack.start_worker({"PERDURE_METRICS_PORT": str(first)})
    driver = await stack.client()

    def measured(port: int) -> list[float]:
        found = series(read(f"http://127.0.0.1:{port}").text)
        return [value for (name, _), value in found.items() if name == "gen_ai_invoke_agent_duration_seconds_count"]

    async def rests(session_id: str) -> bool:
        described = await driver.get_workflow_handle(session_id).describe()
        return measured(first) == [2] and not described.raw_description.HasField("pending_workflow_task")

    async with stack.talk() as talk:
        await talk.say("say one")
        await talk.say("say two")
        await until(lambda: rests(talk.session_id), "the driver to rest")
        stack.workers[0].kill()
        stack.start_worker({"PERDURE_METRICS_PORT": str(second)})
        await talk.say("say three")

    wait_until(lambda: bool(measured(second)), "the metrics of the turn")
    assert measured(second) == [1]


async def test_temporals_own_metrics_are_served_where_they_are_wanted(make_stack: StackFactory) -> None:
    port = free_port()
    stack = make_stack(workers=0)
    stack.start_worker({"PERDURE_TEMPORAL_METRICS": f"127.0.0.1:{port}"})

    async with stack.talk() as talk:
        await talk.say("hello")

    assert "temporal_workflow_task_execution_latency_seconds" in read(f"http://127.0.0.1:{port}").text
