"""Seconds from an empty home to pages that answer, and to the first run that is under way: one line of JSON.

    python tests/benchmarks/bench_up.py

The target is 90 s after installation, with the database made and every process started anew.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from precision_time.tests.processes import free_port

DEPLOYMENT = "profiling-campaign/profiling-campaign"


def main() -> int:
    """Start ``up`` in a temporary home, start a Quick run, and stop it all again."""
    with tempfile.TemporaryDirectory(prefix="bench-up-") as folder:
        home = Path(folder) / "home"
        started = time.monotonic()
        command = [sys.executable, "-m", "precision_time", "up", "--home", str(home), "--json"]
        command += ["--port", str(free_port())]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            addresses = json.loads(process.stdout.readline())
            up_s = time.monotonic() - started
            run = _ask(f"{addresses['api']}/deployments/{addresses['deployments'][DEPLOYMENT]}/create_flow_run", {})
            run_url = f"{addresses['api']}/flow_runs/{run['id']}"
            while (state := _ask(run_url)["state"])["type"] in ("SCHEDULED", "PENDING"):
                time.sleep(0.2)
            running_s = time.monotonic() - started
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    result = {
        "up_s": round(up_s, 1),
        "first_run_s": round(running_s, 1),
        "state": state["name"],
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))
    return 0 if state["type"] == "RUNNING" and running_s < 90 else 3


def _ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            # SQLite was locked; Prefect's own pages and clients retry as well.
            if error.code != 503:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
