"""docker-compose.yml: no start without secrets, nothing open to the network, settings that Prefect and Dask know."""

import itertools
import re
import tomllib

import pytest
import yaml

SERVICES = ("postgres", "server", "worker", "deployments", "dask-scheduler", "dask-worker")


@pytest.fixture(scope="module")
def services(compose, fill, secrets):
    return fill(compose["services"], {**secrets, "PREFECT_URL": "http://127.0.0.1:4200"})


def example(deploy) -> dict[str, str]:
    """The variables of .env.example that are not commented out."""
    lines = (deploy / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_services_refuse_to_start_while_the_example_is_not_filled_in(compose, fill, deploy) -> None:
    variables = example(deploy)
    empty = {name for name, value in variables.items() if not value}
    assert empty == {"POSTGRES_PASSWORD", "PREFECT_AUTH_STRING"}
    whole = {name: value or "x" for name, value in variables.items()}
    fill(compose["services"], whole)
    for name in [*sorted(empty), "PREFECT_URL"]:
        with pytest.raises(KeyError, match=f"{name}: .*env.example"):
            fill(compose["services"], {key: value for key, value in whole.items() if key != name})


def test_every_variable_of_the_file_is_in_the_example(compose, deploy) -> None:
    text = (deploy / "docker-compose.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"\$\{([A-Z_]+)", text))
    passed_on = {
        name for service in compose["services"].values() for name, value in service.get("environment", {}).items()
        if value is None
    }  # fmt: skip
    offered = set(re.findall(r"^#?([A-Z_]+)=", (deploy / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert named | passed_on <= offered
    # These two are Compose's own.
    assert offered - named - passed_on == {"COMPOSE_PROFILES", "COMPOSE_FILE"}


def test_every_image_has_a_fixed_tag_and_ours_is_that_of_the_version(services, deploy) -> None:
    version = tomllib.loads((deploy.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert set(services) == set(SERVICES)
    for name, service in services.items():
        image, _, tag = service["image"].partition(":")
        assert tag[:1].isdigit(), name
        assert "latest" not in tag
        assert (image, tag) == ("precision-time", version) or name == "postgres"
        assert ("build" in service) == (image == "precision-time")


def test_every_service_comes_back_and_those_that_others_wait_for_have_a_health_check(services) -> None:
    for name, service in services.items():
        assert service["restart"] == ("on-failure" if name == "deployments" else "unless-stopped"), name
        for waited_for, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert services[waited_for]["healthcheck"]["test"][0] == "CMD"


def test_only_the_server_is_published_and_only_on_the_loopback_address(services) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"server": ["127.0.0.1:4200:4200"]}
    assert not any("network_mode" in service or "privileged" in service for service in services.values())


def test_our_containers_have_no_rights_to_spare(services) -> None:
    for name, service in services.items():
        if name != "postgres":
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_nothing_is_reported_to_anyone_and_results_are_json(services) -> None:
    for name in ("server", "worker", "deployments"):
        environment = services[name]["environment"]
        assert environment["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"
        assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
        assert environment["DO_NOT_TRACK"] == "1"


def test_settings_name_variables_that_prefect_and_dask_know(services) -> None:
    import dask.config
    import distributed  # noqa: F401  # its defaults
    from prefect.settings import Settings

    known = {
        name.upper() for group in itertools.chain([Settings], _groups(Settings))
        for field in group.model_fields.values() for name in _names(field.validation_alias)
    }  # fmt: skip
    by_prefix = {
        f"{group.model_config['env_prefix']}{name}".upper()
        for group in itertools.chain([Settings], _groups(Settings)) for name in group.model_fields
    }  # fmt: skip
    for service in services.values():
        for name in service.get("environment", {}):
            if name.startswith("PREFECT_"):
                assert name in known | by_prefix, name
            if name.startswith("DASK_"):
                dotted = name.removeprefix("DASK_").lower().replace("__", ".")
                assert dask.config.get(dotted, default="unknown") != "unknown", name


def _groups(settings):
    for field in settings.model_fields.values():
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
            yield field.annotation
            yield from _groups(field.annotation)


def _names(alias) -> list[str]:
    choices = getattr(alias, "choices", [])
    return [choice for choice in choices if isinstance(choice, str)]


def test_the_file_for_gpus_gives_them_to_the_services_that_run_ranks(services, deploy) -> None:
    with (deploy / "docker-compose.cuda.yml").open(encoding="utf-8") as file:
        changed = yaml.safe_load(file)["services"]
    assert set(changed) == {"worker", "dask-worker"} <= set(services)
    for service in changed.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    command, plain = changed["dask-worker"]["command"], services["dask-worker"]["command"]
    assert command[:3] == ["dask", "cuda", "worker"]
    assert command[3] == plain[2]
    assert command[-3:] == plain[-3:]


def test_volumes_and_files_that_are_mounted_exist_or_are_made(compose, services, deploy) -> None:
    mounted = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert mounted == {*compose["volumes"], "./certificates"}
    assert (deploy / "make_certificates.sh").stat().st_mode & 0o111
