"""Register deployments and automations on the configured Prefect server, as ``precision-time up`` does on its own.

``python3 register.py HOME [--crash-dead-runs]``; HOME is the worker's folder. Run again, it brings them up to date;
schedules stay as they are, switched on or off.
"""

import argparse
import importlib.metadata

from precision_time.flows.prefect_settings import prepare_prefect

prepare_prefect()  # read at the import below

from precision_time.flows.automations import register_automations  # noqa: E402
from precision_time.flows.deployments import load_forms, plan_deployments, register_deployments  # noqa: E402


def main() -> None:
    """Register, and print the name of each deployment and automation."""
    parser = argparse.ArgumentParser(description="Register deployments and automations on the Prefect server.")
    parser.add_argument("home", help="folder of the worker, for data and registry")
    parser.add_argument("--crash-dead-runs", action="store_true", help="set runs without a heartbeat to Crashed")
    given = parser.parse_args()
    planned = plan_deployments(given.home)
    version = importlib.metadata.version("precision-time")
    ids = register_deployments(planned, load_forms(planned), version=version, keep_schedules=True)
    print(*ids, sep="\n")
    print(*register_automations(deployment_ids=ids, crash_dead_runs=given.crash_dead_runs), sep="\n")


if __name__ == "__main__":
    main()
