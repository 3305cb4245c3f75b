"""Build the zoo: walk every network in supervised processes, resume where a run stopped, and write one Parquet file.

python -m precision_time.tasks.zoo.build [--scratch FOLDER] [--workers 2] [--only TEXT] (--help lists all options)
"""

import argparse
import csv
import importlib
import io
import json
import multiprocessing
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precision_time.predictor.shipped import shipped_path
from precision_time.predictor.walking.walk_module import walk_module
from precision_time.predictor.workloads.walk import POLICIES
from precision_time.predictor.workloads.walk_cache import counting_version
from precision_time.predictor.workloads.zoo import COUNTS, SIZES
from precision_time.storage.columns import encode_columns
from precision_time.tasks.zoo.network import Missing, Network, count_buffer_bytes, count_params

__all__ = ["FACTORY", "build_zoo", "read_walks", "walk_network", "write_zoo"]

#: The function that lists the networks, ``module:function``; every process calls it.
FACTORY = "precision_time.tasks.zoo.catalogue:list_networks"
WALKS = "walks.jsonl"
PROGRESS = "progress.txt"
#: A walk is given up after this time.
LIMIT_S = 900.0
#: A process is replaced after so many networks: torch's caches of shapes only grow.
WALKS_PER_PROCESS = 120
_MISSING_COLUMNS = ("name", "task_input", "rows", "reason")

Report = Callable[[str], None]


def walk_network(network: Network) -> dict[str, Any]:
    """The zoo's record of one network, as plain values for JSON: counts of its module and both walks."""
    start = time.monotonic()
    built = network.build()
    module = built.module
    params = count_params(module)
    if network.params and abs(params / network.params - 1.0) > network.tolerance:
        difference = f"{params} parameters, expected {network.params:.0f}"
    else:
        difference = ""
    built_s = time.monotonic() - start
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        walks = walk_module(module, built.make_batch, loss_of=built.loss_of)
    return {
        "builds": network.builds,
        "params": params,
        "trained_params": count_params(module, trained=True),
        "parameter_tensors": sum(1 for parameter in module.parameters() if parameter.requires_grad),
        "buffer_bytes": count_buffer_bytes(module),
        "sizes": dict(built.sizes),
        "difference": difference,
        "uncounted": sorted({str(item.message) for item in caught if "no rule for its FLOPs" in str(item.message)}),
        "fp32": walks["fp32"].to_columns(),
        "amp": walks["amp"].to_columns(),
        "code": counting_version()[:12],
        "build_s": round(built_s, 3),
        "seconds": round(time.monotonic() - start, 3),
    }


def _load(factory: str) -> list[Network]:
    module, _, function = factory.partition(":")
    networks: list[Network] = getattr(importlib.import_module(module), function)()
    return networks


def _serve(connection: Any, factory: str) -> None:
    """In a process of its own: answer each ``builds`` that arrives with its walk, or with the failure."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    networks = {network.builds: network for network in _load(factory)}
    connection.send("ready")
    while (builds := connection.recv()) is not None:
        try:
            answer = walk_network(networks[builds])
        # A network may raise anything, which must not stop the others.
        except Exception as error:
            answer = {"builds": builds, "failure": f"{type(error).__name__}: {error}"[:500]}
        try:
            connection.send(answer)
        except OSError:
            return  # the walk was given up


@dataclass(slots=True)
class _Worker:
    """A walking process, which is replaced when it dies, hangs or has walked enough."""

    factory: str
    limit_s: float
    process: Any = None
    connection: Any = None
    walked: int = 0

    def walk(self, builds: str) -> dict[str, Any]:
        if self.process is None or self.walked >= WALKS_PER_PROCESS:
            self.stop()
            self.start()
        self.walked += 1
        try:
            self.connection.send(builds)
            if self.connection.poll(self.limit_s):
                answer: dict[str, Any] = self.connection.recv()
                return answer
            reason = f"no walk within {self.limit_s:.0f} s"
        except (EOFError, OSError):
            self.process.join(10)
            reason = f"its process ended with exit code {self.process.exitcode}"
        self.stop(kill=True)
        return {"builds": builds, "failure": reason}

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far, self.factory), daemon=True)
        self.process.start()
        far.close()
        self.walked = 0
        if self.connection.recv() != "ready":
            raise RuntimeError("a walking process did not start")

    def stop(self, *, kill: bool = False) -> None:
        if self.process is None:
            return
        if kill:
            self.process.kill()
        else:
            self.connection.send(None)
        self.process.join(30)
        self.connection.close()
        self.process = None


@dataclass(slots=True)
class _Queue:
    """The walks that are still to do, and the file of finished walks."""

    pending: list[str]
    path: Path
    report: Report
    total: int
    done: int
    failed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: float = field(default_factory=time.monotonic)

    def take(self) -> str | None:
        with self.lock:
            return self.pending.pop(0) if self.pending else None

    def put(self, walk: dict[str, Any]) -> None:
        with self.lock:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"code": counting_version()[:12]} | walk) + "\n")
            self.done += 1
            self.failed += "failure" in walk
            outcome = walk.get("failure") or f"{walk['seconds']:.1f} s"
            minutes = (time.monotonic() - self.started) / 60
            counts = f"{self.done} of {self.total} walks, {self.failed} failed now, {minutes:.1f} min"
            self.report(f"{counts}: {walk['builds']}: {outcome}")


def read_walks(path: Path) -> dict[str, dict[str, Any]]:
    """The walks of a scratch file by ``builds``; a last line that a crash cut short is left out."""
    walks: dict[str, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                walk = json.loads(line)
            except json.JSONDecodeError:
                continue
            walks[walk["builds"]] = walk
    return walks


def build_zoo(
    networks: Iterable[Network],
    *,
    scratch: Path,
    factory: str = FACTORY,
    workers: int = 2,
    retry: bool = False,
    keep: bool = False,
    limit_s: float = LIMIT_S,
    report: Report = print,
) -> dict[str, dict[str, Any]]:
    """Walk the networks without a walk in ``scratch``; returns every walk, or failure, by ``builds``.

    ``factory`` lists the same networks inside the walking processes. A network that fails, hangs or kills its process
    is recorded with the reason; ``retry`` tries it again. Walks made by other code are made again, unless ``keep``.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / WALKS
    distinct = list(dict.fromkeys(network.builds for network in networks))
    done = {
        builds
        for builds, walk in read_walks(path).items()
        if (keep or walk.get("code") == counting_version()[:12]) and not (retry and "failure" in walk)
    }
    pending = [builds for builds in distinct if builds not in done]
    queue = _Queue(pending=pending, path=path, report=report, total=len(distinct), done=len(distinct) - len(pending))

    def work() -> None:
        worker = _Worker(factory=factory, limit_s=limit_s)
        while (builds := queue.take()) is not None:
            queue.put(worker.walk(builds))
        worker.stop()

    threads = [threading.Thread(target=work) for _ in range(min(workers, len(pending)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return read_walks(path)


def write_zoo(
    networks: Iterable[Network],
    *,
    walks: Mapping[str, Mapping[str, Any]],
    missing: Sequence[Missing],
    usual: Mapping[str, str],
    folder: Path,
) -> str:
    """Write zoo.parquet (see ``make_columns``) and zoo_missing.csv into ``folder``; returns a summary in one line."""
    networks = list(networks)
    failed = [
        Missing(network.name, network.task_input, 0, walks.get(network.builds, {}).get("failure", "not walked yet"))
        for network in networks
        if "fp32" not in walks.get(network.builds, {})
    ]
    columns = make_columns(networks, walks=walks, usual=usual)
    data = encode_columns(columns)
    (folder / "zoo.parquet").write_bytes(data)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_MISSING_COLUMNS)
    writer.writerows(sorted([*missing, *failed]))
    (folder / "zoo_missing.csv").write_text(text.getvalue(), encoding="utf-8")
    names, walked = len(set(columns["name"])), sum(place < 0 for place in columns["same_as"])
    return (
        f"{names} names, {len(columns['name'])} rows, {walked} walks, {len(columns)} columns, {len(data)} bytes;"
        f" {len(missing)} without a network, {len(failed)} failed"
    )


def make_columns(
    networks: Sequence[Network], *, walks: Mapping[str, Mapping[str, Any]], usual: Mapping[str, str]
) -> dict[str, list[Any]]:
    """The table by column, rows sorted by name and input.

    Names of one network share a walk: ``same_as`` is the row that has it, -1 in that row itself; the other rows hold
    zeros in the walk's columns. ``usual`` is 1 in the row of a name at its usual input. Sizes are 0 where they are not
    known.
    """
    ready = [network for network in networks if "fp32" in walks.get(network.builds, {})]
    ready.sort(key=lambda network: (network.name, network.task_input))
    place_of: dict[str, int] = {}
    rows: list[Mapping[str, Any]] = []
    columns: dict[str, list[Any]] = {
        name: [] for name in ("name", "task_input", "source", "builds", "note", "usual", "same_as", "expected_params")
    }
    for place, network in enumerate(ready):
        first = place_of.setdefault(network.builds, place)
        walk = walks[network.builds]
        rows.append(walk if first == place else {})
        columns["name"].append(network.name)
        columns["task_input"].append(network.task_input)
        columns["source"].append(network.source)
        columns["builds"].append(network.builds if first == place else "")
        columns["note"].append(network.note)
        columns["usual"].append(int(usual.get(network.name) == network.task_input))
        columns["same_as"].append(-1 if first == place else first)
        columns["expected_params"].append(int(network.params or 0))
    for name in COUNTS:
        columns[name] = [int(row.get(name, 0)) for row in rows]
    for name in SIZES:
        columns[name] = [int(row.get("sizes", {}).get(name, 0)) for row in rows]
    for policy in POLICIES:
        # columns of counts that no network has are left out
        names = {
            name
            for row in rows
            for name, value in row.get(policy, {}).items()
            if value or not name.startswith(("forward_", "backward_"))
        }
        for name in sorted(names):
            columns[f"{policy}_{name}"] = [float(row.get(policy, {}).get(name, 0.0)) for row in rows]
    return columns


def main(arguments: Sequence[str] | None = None) -> None:
    """The command that rebuilds predictor/data/zoo.parquet."""
    from precision_time.tasks.zoo.catalogue import list_zoo

    parser = argparse.ArgumentParser(prog="python -m precision_time.tasks.zoo.build", description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path(".zoo"), help="folder of the walks until all are done")
    parser.add_argument("--workers", type=int, default=2, help="processes that walk at the same time")
    parser.add_argument("--only", default="", help="walk only networks whose name contains this; writes no table")
    parser.add_argument("--retry", action="store_true", help="walk networks that failed before again")
    parser.add_argument("--keep", action="store_true", help="keep walks made by another version of the code")
    parser.add_argument("--table-only", action="store_true", help="walk nothing; write the table from finished walks")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    zoo = list_zoo()
    networks = [network for network in zoo.networks if options.only in network.name]
    options.scratch.mkdir(parents=True, exist_ok=True)

    def report(line: str) -> None:
        print(line, flush=True)
        (options.scratch / PROGRESS).write_text(line + "\n", encoding="utf-8")

    if options.table_only:
        walks = read_walks(options.scratch / WALKS)
    else:
        walks = build_zoo(
            networks,
            scratch=options.scratch,
            workers=options.workers,
            retry=options.retry,
            keep=options.keep,
            report=report,
        )
    if not options.only:
        folder = shipped_path("zoo.parquet").parent
        print(write_zoo(zoo.networks, walks=walks, missing=zoo.missing, usual=zoo.usual, folder=folder))


if __name__ == "__main__":
    main(sys.argv[1:])
