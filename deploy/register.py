"""Register deployments and automations on the configured Prefect server, as ``precision-time up`` does on its own.

``python3 register.py HOME [--stale-after DAYS] [--silent-after DAYS] [--crash-dead-runs]``; HOME is the worker's
folder. Run it again to update them; it keeps the schedules, switched on or off, and both periods unless they are given.
"""

import argparse
import importlib.metadata
from datetime import timedelta

from precision_time.flows.ground.prefect_settings import prepare_prefect

prepare_prefect()  # Prefect reads these settings when it is imported below

from precision_time.flows.stack.automations import register_automations  # noqa: E402
from precision_time.flows.stack.deployments import load_forms, plan_deployments, register_deployments  # noqa: E402


def main() -> None:
    """Register, and print the name of each deployment and automation."""
    parser = argparse.ArgumentParser(description="Register deployments and automations on the Prefect server.")
    parser.add_argument("home", help="the worker's folder, for data and registry")
    parser.add_argument("--crash-dead-runs", action="store_true", help="set runs without a heartbeat to Crashed")
    parser.add_argument(
        "--stale-after", type=parse_days, metavar="DAYS", help="age at which the artifact in use counts as stale (30)"
    )
    parser.add_argument(
        "--silent-after",
        type=parse_days,
        metavar="DAYS",
        help="time without a night that ends well after which an event is raised (3)",
    )
    arguments = parser.parse_args()
    planned = plan_deployments(arguments.home, stale_after_days=arguments.stale_after)
    version = importlib.metadata.version("precision-time")
    ids = register_deployments(planned, load_forms(planned), version=version, keep_schedules=True)
    print(*ids, sep="\n")
    silent_after = None if arguments.silent_after is None else timedelta(days=arguments.silent_after)
    names = register_automations(
        deployment_ids=ids, silent_after=silent_after, crash_dead_runs=arguments.crash_dead_runs
    )
    print(*names, sep="\n")


def parse_days(text: str) -> float:
    """Days between a minute and a century; anything else is a usage error."""
    days = float(text)
    if not 0.001 <= days <= 36_500:
        raise ValueError
    return days


if __name__ == "__main__":
    main()
