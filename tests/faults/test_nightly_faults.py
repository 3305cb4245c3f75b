"""Unattended retraining with a real Prefect server: what replaces a champion, and what automations watch."""

import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from precision_time.storage.registry import Registry
from precision_time.tests.faults.prefect_server import PrefectServer
from precision_time.tests.processes import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

WAIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path_factory.mktemp("nightly") / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(server: PrefectServer, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run ``python ARGUMENTS`` with the server as its API."""
    environment = server.environment | {
        "PREFECT_API_URL": server.url, "PREFECT_HOME": str(tmp_path / "prefect"), "HOME": str(tmp_path),
    }  # fmt: skip

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment, capture_output=True, text=True, timeout=4 * WAIT_S, check=False, cwd=tmp_path,
        )  # fmt: skip

    return run


@contextlib.contextmanager
def client_of(server: PrefectServer) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: server.url}), get_client(sync_client=True) as client:
        yield client
        # Send this process's events while the server runs: a later drain of the worker would wait for ever.
        EventsWorker.drain_all(timeout=WAIT_S)


def events(client: Any, prefix: str) -> list[dict[str, Any]]:
    answer = client.request("POST", "/events/filter", json={"filter": {"event": {"prefix": [prefix]}}, "limit": 50})
    return answer.json()["events"]


def slow_down(rows, factor: float):
    import dataclasses

    return [
        dataclasses.replace(
            row,
            cell_id=uuid.uuid5(uuid.NAMESPACE_OID, f"{row.cell_id} {factor}").hex[:16],
            iteration_time_s=row.iteration_time_s * factor,
            compute_time_s=row.compute_time_s * factor,
        )
        for row in rows
    ]


def test_a_better_challenger_replaces_the_champion_a_worse_one_does_not_and_a_roll_back_restores_the_first(
    run, server: PrefectServer, tmp_path: Path, measure, record, capsys: pytest.CaptureFixture[str]
) -> None:
    from precision_time.__main__ import run as run_command

    data, registry = str(tmp_path / "timings"), str(tmp_path / "registry")

    def retrain() -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        with client_of(server):
            code = run_command(["retrain", "--data", data, "--registry", registry, "--json"])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        return code, json.loads(printed.out)

    def in_use() -> str:
        # A process keeps the artifact that it has loaded, so each question gets a new process.
        done = run(
            "-m", "precision_time", "predict", "--model", "vit_tiny", "--precision", "fp32", "--batch-size", "16",
            "--artifact", f"{registry}/default@champion", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["artifact_id"]

    record(data, measure(models=("mlp",), batches=(8, 16, 32, 64)))
    code, first = retrain()
    assert (code, first["status"], first["artifact_id"]) == (0, "published", "default@1")

    record(data, measure(models=("vit_tiny", "bert_mini")))
    code, better = retrain()
    assert (code, better["status"], better["artifact_id"]) == (0, "published", "default@2")
    judged = {comparison["what"]: comparison for comparison in better["decision"]["comparisons"]}
    assert judged["new rows"]["challenger"] < judged["new rows"]["champion"]
    assert in_use() == "default@2"

    # The same configurations, each off by another factor: training on them makes predictions worse.
    record(data, measure(models=("mlp", "vit_tiny", "bert_mini"), noise=1.0, seed=5))
    code, worse = retrain()
    assert (code, worse["status"], worse["artifact_id"]) == (3, "held back", "default@2")
    assert [comparison["what"] for comparison in worse["decision"]["comparisons"] if comparison["worse"]]
    assert any("the champion's" in reason and ": worse" in reason for reason in worse["reasons"])
    assert in_use() == "default@2"
    assert Registry(registry).versions("default") == [1, 2]
    # With the same data, champion and settings nothing is judged again, by hand or by night.
    code, again = retrain()
    assert (code, again["status"], again["artifact_id"]) == (0, "nothing new", "default@2")
    assert again["reasons"] == ["held back before on the same data, because " + "; ".join(worse["reasons"])]

    assert run_command(["registry", "rollback", "default", "--url", registry]) == 0
    assert capsys.readouterr().out.strip() == "default@champion is version 1"
    assert in_use() == "default@1"


def test_a_night_whose_challenger_is_worse_than_the_champion_ends_completed_with_the_numbers_as_its_reason(
    server: PrefectServer, tmp_path: Path, measure, record
) -> None:
    from precision_time.flows.retraining.nightly import nightly_retrain
    from precision_time.flows.retraining.spec import NightlySpec

    data, registry = str(tmp_path / "timings"), str(tmp_path / "registry")
    with client_of(server) as client:
        record(data, measure(models=("mlp", "vit_tiny")))
        nightly_retrain(NightlySpec(data=data, registry=registry))
        record(data, measure(models=("mlp", "vit_tiny"), noise=1.0, seed=5))
        state = nightly_retrain(NightlySpec(data=data, registry=registry), return_state=True)
        run = client.read_flow_run(state.state_details.flow_run_id)
        assert run.name == "nightly retrain default"
        assert run.state.is_completed()
    night = state.result().retraining
    assert (night.status, night.artifact_id) == ("held back", "default@1")
    assert any("the champion's" in reason and ": worse" in reason for reason in night.reasons)
    assert Registry(registry).aliases("default") == {"champion": 1}


def test_nights_say_by_events_what_they_did_and_a_drift_sets_off_its_automation(
    server: PrefectServer, tmp_path: Path, measure, record
) -> None:
    from precision_time.flows.retraining.nightly import nightly_retrain
    from precision_time.flows.retraining.spec import NightlySpec
    from precision_time.flows.stack.automations import AUTOMATIONS, register_automations

    data, registry = str(tmp_path / "timings"), str(tmp_path / "registry")

    def night() -> dict[str, Any]:
        retraining = nightly_retrain(NightlySpec(data=data, registry=registry)).retraining
        assert retraining is not None
        return retraining.model_dump()

    with client_of(server) as client:
        register_automations(deployment_ids={})
        record(data, measure(models=("mlp", "vit_tiny")))
        assert night()["status"] == "published"
        assert night()["status"] == "nothing new"
        record(data, slow_down(measure(models=("mlp",), seed=3), 2.0))
        drifted = night()
        assert drifted["drift"]["verdict"] == "drifting"
        drifting = "precision-time.predictor.drifting"
        wait_for(lambda: events(client, drifting), seconds=WAIT_S, what="the event of a drift")
        names = {event["event"].rpartition(".")[2] for event in events(client, "precision-time.predictor.")}
        assert {"published", "nothing-new", "night-ended", "drifting"} <= names
        old = nightly_retrain(NightlySpec(data=data, registry=registry, stale_after_days=1e-6))
        assert old.stale is not None

        def triggered() -> list[str]:
            return [
                event["resource"]["prefect.resource.name"] for event in events(client, "prefect.automation.triggered")
            ]

        wait_for(lambda: AUTOMATIONS["drifting"] in triggered(), seconds=WAIT_S, what="the automation of a drift")
        wait_for(
            lambda: AUTOMATIONS["stale"] in triggered(), seconds=WAIT_S, what="the automation of a stale predictor"
        )
        assert triggered().count(AUTOMATIONS["drifting"]) == 1
        assert AUTOMATIONS["silent"] not in triggered()


def test_automations_are_registered_once_and_watch_failures_silence_and_runs_that_are_dead(
    server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow
    from prefect.automations import AutomationCore
    from prefect.client.schemas.objects import StateType
    from prefect.events import emit_event
    from prefect.states import Failed, Running

    from precision_time.flows.retraining.predictor_events import announce
    from precision_time.flows.stack import automations
    from precision_time.flows.stack.automations import AUTOMATIONS, register_automations

    monkeypatch.setattr(automations, "_heartbeat_s", lambda: 3)
    with client_of(server) as client:
        flow_id = client.create_flow(flow(lambda: None, name="nightly-retrain"))
        deployment = client.create_deployment(flow_id, name="nightly-retrain")
        ids = {"nightly-retrain/nightly-retrain": deployment}

        def registered() -> dict[str, Any]:
            automations = {automation.name: automation for automation in client.read_automations()}
            return {name: automations[name] for name in automations.keys() & set(AUTOMATIONS.values())}

        assert set(register_automations(deployment_ids=ids)) == set(AUTOMATIONS.values())
        first = registered()
        assert not first[AUTOMATIONS["dead"]].enabled
        register_automations(deployment_ids=ids)
        assert registered() == first

        # A person's choices stay, the period too; the rest of a trigger is updated.
        client.pause_automation(first[AUTOMATIONS["drifting"]].id)
        silence = first[AUTOMATIONS["silent"]]
        edited = silence.trigger.model_copy(update={"within": timedelta(days=9), "for_each": set()})
        client.update_automation(silence.id, AutomationCore(name=silence.name, trigger=edited, actions=silence.actions))
        register_automations(deployment_ids=ids)
        trigger = registered()[AUTOMATIONS["silent"]].trigger
        assert (trigger.within, trigger.for_each) == (timedelta(days=9), {"prefect.resource.id"})
        register_automations(deployment_ids=ids, silent_after=timedelta(seconds=10), crash_dead_runs=True)
        later = registered()
        assert {name: later[name].id for name in later} == {name: first[name].id for name in first}
        assert not later[AUTOMATIONS["drifting"]].enabled
        assert later[AUTOMATIONS["dead"]].enabled
        assert later[AUTOMATIONS["silent"]].trigger.within == timedelta(seconds=10)

        failed = client.create_flow_run_from_deployment(deployment)
        client.set_flow_run_state(failed.id, Failed(message="storage away"), force=True)
        dead = client.create_flow_run_from_deployment(deployment)
        client.set_flow_run_state(dead.id, Running(), force=True)
        emit_event(
            "prefect.flow-run.heartbeat",
            resource={"prefect.resource.id": f"prefect.flow-run.{dead.id}"},
            related=[
                {"prefect.resource.id": f"prefect.deployment.{deployment}", "prefect.resource.role": "deployment"}
            ],
        )
        # Two predictors had a night, and only one of them goes on: the other one is silent.
        for predictor in ("quiet", "busy"):
            announce("night-ended", name=predictor, payload={})
        expected = {AUTOMATIONS[what] for what in ("failing", "silent", "dead")}

        def all_fired() -> bool:
            announce("night-ended", name="busy", payload={})
            fired = events(client, "prefect.automation.triggered")
            return expected <= {event["resource"]["prefect.resource.name"] for event in fired}

        wait_for(all_fired, seconds=WAIT_S, what="each automation")
        silent = [
            event["payload"]["triggering_labels"]["prefect.resource.id"]
            for event in events(client, "prefect.automation.triggered")
            if event["resource"]["prefect.resource.name"] == AUTOMATIONS["silent"]
        ]
        assert "precision-time.predictor.quiet" in silent
        assert "precision-time.predictor.busy" not in silent
        is_crashed = lambda: client.read_flow_run(dead.id).state.type == StateType.CRASHED  # noqa: E731
        wait_for(is_crashed, seconds=WAIT_S, what="the end of a run that is dead")


def test_the_script_for_teams_sets_both_periods_and_keeps_them_when_it_runs_again(
    run, server: PrefectServer, tmp_path: Path
) -> None:
    from precision_time.flows.stack.automations import AUTOMATIONS

    script = str(Path(__file__).parents[2] / "deploy" / "register.py")

    def periods() -> tuple[float, timedelta]:
        with client_of(server) as client:
            nightly = client.read_deployment_by_name("nightly-retrain/nightly-retrain")
            (silent,) = client.read_automations_by_name(AUTOMATIONS["silent"])
        return nightly.parameters["spec"]["stale_after_days"], silent.trigger.within

    for periods_given in (["--stale-after", "14", "--silent-after", "2"], []):
        done = run(script, str(tmp_path / "home"), *periods_given)
        assert done.returncode == 0, done.stderr
        assert set(AUTOMATIONS.values()) <= set(done.stdout.splitlines())
        assert periods() == (14, timedelta(days=2))
    refused = run(script, str(tmp_path / "home"), "--stale-after", "0")
    assert refused.returncode == 2
