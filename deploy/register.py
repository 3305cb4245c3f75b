"""Register deployments and automations on the configured Prefect server, as ``precision-time up`` does on its own.

``python3 register.py HOME [--stale-after DAYS] [--silent-after DAYS] [--crash-dead-runs]``; HOME is the worker's
folder. Run again, it brings them up to date; schedules stay as they are, switched on or off, and so do both periods
where they are not given.
"""

import argparse
import importlib.metadata
from datetime import timedelta

from precision_time.flows.ground.prefect_settings import prepare_prefect

prepare_prefect()  # read at the import below

from precision_time.flows.stack.automations import register_automations  # noqa: E402
from precision_time.flows.stack.deployments import load_forms, plan_deployments, register_deployments  # noqa: E402


def main() -> None:
    """Register, and print the name of each deployment and automation."""
    parser = argparse.ArgumentParser(description="Register deployments and automations on the Prefect server.")
    parser.add_argument("home", help="folder of the worker, for data and registry")
    parser.add_argument("--crash-dead-runs", action="store_true", help="set runs without a heartbeat to Crashed")
    parser.add_argument(
        "--stale-after", type=days, metavar="DAYS", help="a night with an older artifact in use calls it stale (30)"
    )
    parser.add_argument(
        "--silent-after", type=days, metavar="DAYS", help="so long without a night that ends well is told of (3)"
    )
    given = parser.parse_args()
    planned = plan_deployments(given.home, stale_after_days=given.stale_after)
    version = importlib.metadata.version("precision-time")
    ids = register_deployments(planned, load_forms(planned), version=version, keep_schedules=True)
    print(*ids, sep="\n")
    silent_after = None if given.silent_after is None else timedelta(days=given.silent_after)
    names = register_automations(deployment_ids=ids, silent_after=silent_after, crash_dead_runs=given.crash_dead_runs)
    print(*names, sep="\n")


def days(text: str) -> float:
    days = float(text)
    if not 0.001 <= days <= 36_500:
        raise ValueError
    return days


if __name__ == "__main__":
    main()
