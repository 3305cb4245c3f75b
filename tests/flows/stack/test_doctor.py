"""``precision-time doctor``: each thing that is wrong is found, with evidence and a fix, by a made-up server."""

import base64
import importlib.metadata
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from precision_time.__main__ import app, run
from precision_time.flows.stack import doctor, doctor_server
from precision_time.flows.stack.deployments import plan_deployments
from precision_time.flows.stack.doctor import Installation, examine
from precision_time.flows.stack.findings import Finding

LOGIN = "team:secret-word"


class Server(ThreadingHTTPServer):
    """Answers the doctor's requests like Prefect's server; tests change its answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.login: str | None = None
        self.answers: dict[str, Any] = {
            "/api/health": True,
            "/api/admin/version": importlib.metadata.version("prefect"),
            "/api/work_pools/campaigns": {"is_paused": False},
            "/api/work_pools/campaigns/workers/filter": [
                {"name": "gpu-box", "status": "ONLINE", "last_heartbeat_time": "2026-01-01T00:00:00Z"}
            ],
        }
        for planned in plan_deployments("/h"):
            self.answers[f"/api/deployments/name/{planned.full_name}"] = {
                "entrypoint": planned.entrypoint,
                "version": importlib.metadata.version("precision-time"),
                "parameters": planned.parameters,
            }

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.server.login and "Basic " + base64.b64encode(self.server.login.encode()).decode()
        if wanted and self.path != "/api/health" and self.headers.get("Authorization") != wanted:
            return self.send_error(401)
        if self.path not in self.server.answers:
            return self.send_error(404)
        body = json.dumps(self.server.answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "PREFECT_API_URL",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_SERVER_API_AUTH_STRING",
        "PRECISION_TIME_REGISTRY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)


def make_installation(**changes: Any) -> Installation:
    values: dict[str, Any] = dict.fromkeys(("api", "login", "cluster", "data", "registry"))
    return Installation(**(values | changes))


def find(installation: Installation, topic: str, level: str = "problem") -> Finding:
    (match,) = [finding for finding in examine(installation) if (finding.topic, finding.level) == (topic, level)]
    assert match.fix or level == "ok"
    return match


def test_a_machine_on_which_nothing_runs_is_well() -> None:
    assert {finding.level for finding in examine(make_installation())} == {"ok"}


def test_a_server_in_order_is_well(server: Server) -> None:
    assert {finding.level for finding in examine(make_installation(api=server.api))} == {"ok"}
    assert "gpu-box" in find(make_installation(api=server.api), "worker", "ok").evidence


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    finding = find(make_installation(api="http://user:secret-word@127.0.0.1:9/api"), "prefect")
    assert "127.0.0.1:9" in finding.evidence
    assert "secret-word" not in str(finding)


@pytest.mark.parametrize(
    ("path", "answer", "topic", "words"),
    [
        ("/api/work_pools/campaigns", None, "pool", "work-pool create"),
        ("/api/work_pools/campaigns", {"is_paused": True}, "pool", "work-pool resume"),
        ("/api/work_pools/campaigns/workers/filter", [], "worker", "worker start"),
        ("/api/deployments/name/roll-back/roll-back", None, "deployments", "prefect deploy"),
        (
            "/api/deployments/name/roll-back/roll-back",
            {"entrypoint": "other", "version": "0.0.1", "parameters": {}},
            "deployments",
            "precision-time up",
        ),
    ],
)
def test_what_keeps_runs_waiting_is_found(server: Server, path: str, answer: Any, topic: str, words: str) -> None:
    server.answers[path] = answer
    if answer is None:
        del server.answers[path]
    assert words in find(make_installation(api=server.api), topic).fix


def test_a_server_of_another_release_is_a_warning(server: Server) -> None:
    server.answers["/api/admin/version"] = "3.0.0"
    assert "server 3.0.0" in find(make_installation(api=server.api), "prefect", "warning").evidence


@pytest.mark.parametrize("login", [None, "team:wrong"])
def test_a_missing_and_a_wrong_login_are_told_apart_from_a_server_that_is_away(
    server: Server, login: str | None
) -> None:
    server.login = LOGIN
    finding = find(make_installation(api=server.api, login=login), "auth")
    assert "401" in finding.evidence
    assert "PREFECT_API_AUTH_STRING" in finding.fix
    assert "team:" not in str(finding)
    accepted = find(make_installation(api=server.api, login=LOGIN), "auth", "ok")
    assert accepted.what == "the server requires a login, and accepts the one that is set"


def test_an_open_server_and_plain_http_on_the_network_are_problems(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_server, "is_loopback", lambda url: False)
    assert "unencrypted" in find(make_installation(api=server.api), "tls").what
    assert "PREFECT_SERVER_API_AUTH_STRING" in find(make_installation(api=server.api), "auth").fix


def test_a_dask_scheduler_on_the_network_needs_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONNECT_S", 0.2)
    assert "tls://" in find(make_installation(cluster="tcp://192.0.2.1:8786"), "tls").fix
    assert "tls" not in {finding.topic for finding in examine(make_installation(cluster="tls://192.0.2.1:8786"))}
    assert "tcp://127.0.0.1:9" in find(make_installation(cluster="tcp://127.0.0.1:9"), "dask").evidence


def test_two_distributions_of_xgboost_and_a_wrong_dask_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    made_up = {"xgboost": "3.2.0", "xgboost-cpu": "3.2.0", "dask": "2020.1.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: made_up.get(name) or real(name))
    problems = {finding.what: finding for finding in examine(make_installation()) if finding.level == "problem"}
    assert any("own the same files" in what for what in problems)
    assert any("dask 2020.1.0, wanted ==" in finding.evidence for finding in problems.values())


@pytest.mark.parametrize(
    ("listed", "answer", "level", "word"),
    [
        (2, '["13.0", 2]', "problem", "dask-cuda"),
        (2, '["13.0", 1]', "problem", "driver 2, torch 1"),
        (2, "[null, 0]", "problem", "driver 2, torch 0"),
    ],
)
def test_gpus_of_the_driver_that_torch_does_not_see_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, listed: int, answer: str, level: str, word: str
) -> None:
    done = subprocess.CompletedProcess[str]([], 0, stdout=answer, stderr="")
    monkeypatch.setattr(doctor, "count_gpus", lambda: listed)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *arguments, **options: done)
    finding = find(make_installation(), "gpus", level)
    assert word in f"{finding.what} {finding.evidence}"


def test_places_that_cannot_be_written_are_problems(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for topic in ("data", "registry"):
        assert find(make_installation(**{topic: str(tmp_path / "file")}), topic).evidence
        assert find(make_installation(**{topic: str(tmp_path / topic)}), topic, "ok")


def test_a_store_that_takes_calls_and_says_nothing_is_a_problem_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "STORE_ANSWER_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        began = time.monotonic()
        finding = find(make_installation(registry="s3://bucket/registry"), "registry")
    assert time.monotonic() - began < 30  # the library alone would ask again for minutes
    assert "s3" in f"{finding.what} {finding.evidence}"


def test_a_check_that_breaks_is_a_finding_and_stops_no_other(server: Server) -> None:
    server.answers["/api/work_pools/campaigns"] = "no pool at all"
    finding = find(make_installation(api=server.api), "prefect")
    assert "TypeError" in finding.evidence


def test_the_command_ends_with_3_only_when_there_is_a_problem(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    server.answers["/api/work_pools/campaigns/workers/filter"] = []
    assert run(["doctor", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {"topic", "level", "what", "evidence", "fix"} == set(report["findings"][0])
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 3
    assert "problem  worker: no worker is online" in shown.output


def test_an_api_that_was_set_wrongly_is_told_from_one_that_is_away(server: Server) -> None:
    without_path = server.api.removesuffix("/api")
    for api, what in ((without_path, "is not Prefect's API"), ("banana", "not the address of a server")):
        finding = find(make_installation(api=api), "prefect")
        assert what in finding.what
        assert "/api" in finding.fix


def test_a_stack_that_was_killed_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text("{}", encoding="utf-8")
    installation = Installation.find(tmp_path)
    assert "without cleaning up" in find(installation, "up", "warning").what
