"""A Prefect server that tests start, kill and inspect."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from precision_time.tests.processes import free_port, wait_for

__all__ = ["PrefectServer"]

START_S = 180.0


class PrefectServer:
    """``prefect server start`` on a free port, with a database that outlives it."""

    def __init__(self, home: Path) -> None:
        self.environment = os.environ | {
            "PREFECT_HOME": str(home),
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        self.environment.pop("PREFECT_API_URL", None)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        import httpx

        self.process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, "the server ended"
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            return False

        wait_for(answers, seconds=START_S, what="an answer of the server", poll_s=0.3)

    def assert_caught_up(self, *, cells: int) -> None:
        """The run and its tasks are Completed, the table is full, and the bar at its end."""
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            runs, tasks = client.read_flow_runs(), client.read_task_runs()

            def read_page(key: str) -> object:
                (page,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
                return page.data

            bar, table = read_page("campaign-faults-progress"), read_page("campaign-faults")
        assert [run.state_type and run.state_type.value for run in runs] == ["COMPLETED"]
        assert [task.state_type and task.state_type.value for task in tasks] == ["COMPLETED"] * cells
        assert bar == 100.0
        assert len(json.loads(str(table))) == cells

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
