"""The login of team mode: it is required and accepted, a command without it says so, and no log contains it."""

import json

import httpx
import pytest

pytestmark = pytest.mark.faults

CAMPAIGN = {
    "name": "login",
    "models": ["mlp"],
    "precisions": ["fp32"],
    "gpus": [1],
    "batch_sizes": [4],
    "device": "cpu",
}


def test_the_api_answers_only_to_the_login(team, secrets) -> None:
    user, password = secrets["PREFECT_AUTH_STRING"].split(":")

    def ask(**how: object) -> int:
        return httpx.post(f"{team.url}/flows/filter", json={}, timeout=30, **how).status_code  # type: ignore[arg-type]

    assert ask() == 401
    assert ask(auth=(user, "guess")) == 401
    assert ask(auth=(user, password)) == 200
    # This is the address that a load balancer checks.
    assert httpx.get(f"{team.url}/health", timeout=30).status_code == 200


@pytest.mark.parametrize(
    ("login", "said"),
    [({"PREFECT_API_AUTH_STRING": ""}, "401 Unauthorized, without"),
     ({"PREFECT_API_AUTH_STRING": "team:a-wr0ng-guess"}, "401 Unauthorized, with the login of")],
)  # fmt: skip
def test_a_command_without_the_login_says_what_is_missing_and_not_what_it_is(team, login, said) -> None:
    file = team.data / "login.json"
    file.write_text(json.dumps(CAMPAIGN | {"data": "login-data"}), encoding="utf-8")
    done = team.run("worker", "precision-time", "campaign", str(file), **login)
    assert done.returncode == 2, done.stderr
    assert "the Prefect API refuses the login" in done.stderr
    assert f"{said} PREFECT_API_AUTH_STRING" in done.stderr
    assert "fix: set PREFECT_API_AUTH_STRING=user:password" in done.stderr
    assert "a-wr0ng-guess" not in done.stdout + done.stderr
    assert not (team.data / "login-data" / "timings").exists()


def test_no_secret_is_in_a_log(team, secrets) -> None:
    for service in ("postgres", "server", "worker"):
        for secret in secrets.values():
            assert secret.rpartition(":")[2] not in team.log(service), service
