"""What the doctor checks of Prefect's server: its answer, login and version, its work pool and its deployments."""

import base64
import json
import urllib.error
import urllib.request
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from precision_time.flows.ground.addresses import is_loopback, without_password
from precision_time.flows.stack.deployments import POOL, plan_deployments
from precision_time.flows.stack.findings import Finding, fine, problem, warning

__all__ = ["examine_server"]

ANSWER_S = 5.0


def examine_server(api: str | None, *, login: str | None) -> tuple[list[Finding], str | None]:
    """The findings about the server at ``api``, and the cluster in its deployed campaign, where known."""
    if api is None:
        return [fine("prefect", "no server is set, so each campaign starts its own")], None
    shown = without_password(api)
    findings = _examine_transport(api, shown, login)
    if urlsplit(api).scheme not in ("http", "https"):
        fix = "write it as http://host:4200/api"
        return [problem("prefect", "PREFECT_API_URL is not the address of a server", evidence=shown, fix=fix)], None
    try:
        _ask(api, "/health", login=None)
    except urllib.error.HTTPError as error:
        fix = "end PREFECT_API_URL with /api" if error.code == 404 else "see the server's log"
        what = "the address answers, but is not Prefect's API" if error.code == 404 else "the server reports an error"
        return [*findings, problem("prefect", what, evidence=f"{shown}: {error}", fix=fix)], None
    except urllib.error.URLError as error:
        fix = "start precision-time up, or unset PREFECT_API_URL to do without a server"
        findings.append(problem("prefect", "the server does not answer", evidence=f"{shown}: {error}", fix=fix))
        return findings, None
    refusal = _refusal(api, login)
    findings.append(_examine_login(api, refusal, login))
    if refusal is not None:
        return findings, None
    findings += [_examine_version(_ask(api, "/admin/version", login=login), shown), *_examine_pool(api, login)]
    deployed, cluster = _examine_deployments(api, login)
    return [*findings, *deployed], cluster


def _ask(api: str, path: str, *, login: str | None, body: Any = None) -> Any:
    request = urllib.request.Request(
        api.rstrip("/") + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    if login:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.loads(answer.read() or b"null")


def _refusal(api: str, login: str | None) -> str | None:
    try:
        _ask(api, "/admin/version", login=login)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return f"{error.code} {error.reason}"
        raise
    return None


def _examine_transport(api: str, shown: str, login: str | None) -> list[Finding]:
    if is_loopback(api) or urlsplit(api).scheme == "https":
        return []
    fix = "put TLS in front of it, and set PREFECT_API_URL=https://..."
    what = "the login crosses the network unencrypted" if login else "everything crosses the network unencrypted"
    return [problem("tls", what, evidence=shown, fix=fix)]


def _examine_login(api: str, refusal: str | None, login: str | None) -> Finding:
    if refusal is not None:
        what = "the server refuses the login" if login else "the server requires a login"
        fix = "set PREFECT_API_AUTH_STRING=user:password to the server's login"
        return problem("auth", what, evidence=refusal, fix=fix)
    if _refusal(api, None) is not None:
        return fine("auth", "the server requires a login, and accepts the one that is set")
    if is_loopback(api):
        return fine("auth", "the server requires no login; its address can be reached from this machine only")
    return problem(
        "auth",
        "anyone who reaches the server can start runs",
        evidence=f"{without_password(api)} answers without a login",
        fix="start it with PREFECT_SERVER_API_AUTH_STRING=user:password",
    )


def _examine_version(theirs: str, shown: str) -> Finding:
    ours = version("prefect")
    if theirs == ours:
        return fine("prefect", f"the server answers; its version is {theirs}, as here", shown)
    return warning(
        "prefect",
        "the server has another version than the library here",
        evidence=f"server {theirs}, here {ours}",
        fix=f"pip install prefect=={theirs}, or bring the server to {ours}",
    )


def _examine_pool(api: str, login: str | None) -> list[Finding]:
    try:
        pool = _ask(api, f"/work_pools/{POOL}", login=login)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        fix = f"precision-time up, or prefect work-pool create --type process {POOL}"
        return [problem("pool", f"there is no work pool {POOL}", fix=fix)]
    workers = _ask(api, f"/work_pools/{POOL}/workers/filter", login=login, body={})
    online = [worker["name"] for worker in workers if worker["status"] == "ONLINE"]
    findings = [fine("worker", f"{len(online)} online in the pool {POOL}", ", ".join(online[:5]))]
    if not online:
        last_seen = max((worker["last_heartbeat_time"] or "" for worker in workers), default="") or "never"
        fix = f"precision-time up, or prefect worker start --pool {POOL} on the machine with the devices"
        evidence = f"last seen: {last_seen}"
        findings = [problem("worker", "no worker is online, so runs wait", evidence=evidence, fix=fix)]
    if pool["is_paused"]:
        fix = f"prefect work-pool resume {POOL}"
        findings.append(problem("pool", f"the pool {POOL} is paused, so runs wait", fix=fix))
    return findings


def _examine_deployments(api: str, login: str | None) -> tuple[list[Finding], str | None]:
    ours, cluster = version("precision-time"), None
    missing, outdated, registered = [], [], []
    for planned in plan_deployments("/"):
        try:
            deployment = _ask(api, f"/deployments/name/{planned.full_name}", login=login)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            missing.append(planned.full_name)
            continue
        registered.append(planned.name)
        if deployment["entrypoint"] != planned.entrypoint or (deployment["version"] or ours) != ours:
            outdated.append(f"{planned.name} {deployment['version']} at {deployment['entrypoint']}")
        cluster = (deployment["parameters"].get("spec") or {}).get("cluster", cluster)
    fix = "precision-time up, or prefect deploy --all --prefect-file deploy/prefect.yaml"
    findings = []
    if registered and not outdated:
        findings.append(fine("deployments", f"{len(registered)} are registered", ", ".join(registered)))
    if missing:
        findings.append(problem("deployments", "some are not registered", evidence=", ".join(missing), fix=fix))
    if outdated:
        what = f"some belong to another version than {ours}"
        findings.append(problem("deployments", what, evidence="; ".join(outdated), fix=fix))
    return findings, cluster
