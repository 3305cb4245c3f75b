"""The services of docker-compose.yml as processes of this machine: the same commands, environment and health checks."""

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from precision_time.tests.processes import free_port, wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
START_S = 180.0

SECRETS = {"POSTGRES_PASSWORD": "5up3rs3cr3tdatabase", "PREFECT_AUTH_STRING": "team:5up3rs3cr3tlogin"}
SETTINGS = {**SECRETS, "PREFECT_URL": "http://127.0.0.1:4200"}

#: ${NAME}, ${NAME:-default} and ${NAME:?message} as Compose fills them in; $$ is a plain $.
VARIABLE = re.compile(r"\$\$|\$\{([A-Z_][A-Z0-9_]*)(?::([-?])([^}]*))?\}")


def fill_in(value: Any, settings: dict[str, str]) -> Any:
    """``value`` with its variables filled in; raises ``KeyError`` for a required variable that is not set."""
    if isinstance(value, dict):
        return {key: fill_in(item, settings) for key, item in value.items()}
    if isinstance(value, list):
        return [fill_in(item, settings) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if name is None:
            return "$"
        if settings.get(name):
            return settings[name]
        if kind == "?":
            raise KeyError(f"{name}: {text}")
        return text or ""

    return VARIABLE.sub(replace, value)


def read_compose() -> dict[str, Any]:
    with (DEPLOY / "docker-compose.yml").open(encoding="utf-8") as file:
        document: dict[str, Any] = yaml.safe_load(file)
    return document


def image_environment() -> dict[str, str]:
    """The variables that the Dockerfile sets for every container of the image, except the path."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.removeprefix("ENV ").split() for line in text.splitlines() if line.startswith("ENV ")]
    return {key: value for line in lines for key, _, value in (pair.partition("=") for pair in line) if key != "PATH"}


class Team:
    """The services of the file, started one by one; names of hosts, ports and folders are those of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compose = read_compose()
        self.data = folder / "data"
        self.data.mkdir()
        self.ports = {port: free_port() for port in ("4200", "5432", "8080", "8786")}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://127.0.0.1:{self.ports['4200']}/api"
        self.database_folder: Path | None = None

    def localise(self, text: str) -> str:
        """``text`` with hosts, ports and folders inside containers replaced by those of this machine."""
        text = re.sub(r"//(server|dask-scheduler):", "//127.0.0.1:", text).replace("0.0.0.0", "127.0.0.1")
        for port, here in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(here), text)
        text = text.replace("/opt/precision-time/", f"{DEPLOY}/").replace(
            "/certificates", f"{self.folder}/certificates"
        )
        return re.sub(r"^/data\b", str(self.data), text)

    def environment(self, service: str | None = None) -> dict[str, str]:
        """The environment of a service; without a name, that of the image alone."""
        configured = {} if service is None else self.compose["services"][service].get("environment", {})
        configured = fill_in(configured, SETTINGS)
        values = image_environment() | {key: value for key, value in configured.items() if value is not None}
        values = {key: "127.0.0.1" if value == "postgres" else self.localise(value) for key, value in values.items()}
        path = os.pathsep.join([str(Path(sys.executable).parent), *map(str, postgresql_folder()), os.defpath])
        # In containers the worker's health check has its own port 8080; here it needs a free port.
        return values | {"PATH": path, "PREFECT_WORKER_WEBSERVER_PORT": str(self.ports["8080"]), "OMP_NUM_THREADS": "1"}

    def command(self, service: str) -> list[str]:
        return [self.localise(word) for word in fill_in(self.compose["services"][service]["command"], SETTINGS)]

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(errors="replace")

    def start(self, service: str) -> None:
        """Start a service and wait until its own health check passes."""
        command = self.database_command() if service == "postgres" else self.command(service)
        user = (
            {"user": "postgres", "group": "postgres", "extra_groups": []} if service == "postgres" and is_root() else {}
        )
        with (self.folder / f"{service}.log").open("wb") as log:
            self.running[service] = subprocess.Popen(
                command, cwd="/" if service == "postgres" else self.data, env=self.environment(service),
                stdout=log, stderr=log, start_new_session=True, **user,
            )  # fmt: skip
        self.wait_until_healthy(service)

    def wait_until_healthy(self, service: str) -> None:
        test = self.compose["services"][service].get("healthcheck", {}).get("test")

        def is_healthy() -> bool:
            assert self.running[service].poll() is None, self.log(service)[-3000:]
            return test is None or self.check(service, test) == 0

        wait_for(is_healthy, seconds=START_S, what=f"a healthy {service}", poll_s=0.5)

    def check(self, service: str, test: list[str]) -> int:
        assert test[0] == "CMD"
        command = [self.localise(word) for word in test[1:]]
        if command[0] == "pg_isready":
            command += ["--host", "127.0.0.1", "--port", str(self.ports["5432"])]
        return subprocess.run(command, env=self.environment(service), capture_output=True, timeout=60).returncode

    def run(self, service: str, *command: str, timeout: float = 120, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in the environment of a service."""
        return subprocess.run(
            command,
            cwd=self.data,
            env=self.environment(service) | more,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def database_command(self) -> list[str]:
        """Create the database as the image does at its first start, and return the command that starts it."""
        service = fill_in(self.compose["services"]["postgres"]["environment"], SETTINGS)
        user = {"user": "postgres", "group": "postgres", "extra_groups": []} if is_root() else {}
        self.database_folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        if is_root():
            os.chown(self.database_folder, pwd.getpwnam("postgres").pw_uid, -1)
        folder, port = self.database_folder, str(self.ports["5432"])

        def run(*command: str, **more: str) -> None:
            done = subprocess.run(
                command, cwd="/", env=self.environment() | more, capture_output=True, text=True, timeout=120, **user
            )
            assert done.returncode == 0, done.stderr

        password = Path(folder, "password")
        password.write_text(service["POSTGRES_PASSWORD"], encoding="utf-8")
        name = service["POSTGRES_USER"]
        run("initdb", "--pgdata", f"{folder}/data", "--username", name, "--auth", "scram-sha-256",
            "--pwfile", str(password), "--encoding", "UTF8", "--no-sync")  # fmt: skip
        options = f"-p {port} -h 127.0.0.1 -k {folder} -F"
        run(
            "pg_ctl",
            "--pgdata",
            f"{folder}/data",
            "--options",
            options,
            "--log",
            f"{folder}/first.log",
            "--wait",
            "start",
        )
        run("createdb", "--host", "127.0.0.1", "--port", port, "--username", name, service["POSTGRES_DB"],
            PGPASSWORD=service["POSTGRES_PASSWORD"])  # fmt: skip
        run("pg_ctl", "--pgdata", f"{folder}/data", "--wait", "stop")
        return ["postgres", "-D", f"{folder}/data", *options.split()]

    def ask_database(self, statement: str, *, database: str = "prefect") -> str:
        """The answer of psql, without headings and alignment."""
        done = self.run(
            "postgres", "psql", "--host", "127.0.0.1", "--port", str(self.ports["5432"]), "--username", "prefect",
            "--dbname", database, "--no-align", "--tuples-only", "--command", statement,
            PGPASSWORD=SECRETS["POSTGRES_PASSWORD"],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def stop(self) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        if self.database_folder is not None:
            shutil.rmtree(self.database_folder, ignore_errors=True)


def is_root() -> bool:
    return os.geteuid() == 0


def postgresql_folder() -> list[Path]:
    """Where Debian keeps the server's programs, which are not on the path."""
    return sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]


@pytest.fixture(scope="session")
def deploy() -> Path:
    """The folder with the files under test."""
    return DEPLOY


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    """docker-compose.yml as it stands."""
    return read_compose()


@pytest.fixture(scope="session")
def fill() -> Callable[[Any, dict[str, str]], Any]:
    """Fill in the variables of a value as Compose does."""
    return fill_in


@pytest.fixture(scope="session")
def secrets() -> dict[str, str]:
    """The secrets that the running services were given."""
    return SECRETS


@pytest.fixture(scope="session")
def make_team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Team]]:
    """Make services of the file, none of them started yet."""
    teams: list[Team] = []

    def make() -> Team:
        teams.append(Team(tmp_path_factory.mktemp("team")))
        return teams[-1]

    yield make
    for team in teams:
        team.stop()


@pytest.fixture(scope="session")
def team(make_team: Callable[[], Team]) -> Team:
    """PostgreSQL, the server, a worker, and the deployments registered: what `docker compose up` starts."""
    assert postgresql_folder(), "PostgreSQL is missing; apt-get install postgresql"
    team = make_team()
    for service in ("postgres", "server", "worker"):
        team.start(service)
    done = team.run("deployments", *team.command("deployments"))
    assert done.returncode == 0, done.stdout + done.stderr
    return team
