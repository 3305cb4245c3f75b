"""The Dockerfiles without Docker: the files they copy are there and enough, and what they install and run exists."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.cuda")


def read_lines(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its arguments, continued lines joined."""
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def values(name: str, instruction: str) -> list[str]:
    return [rest for word, rest in read_lines(name) if word == instruction]


def sent_files(name: str) -> list[Path]:
    """The files that a build is sent: the tracked files that the ignore file lets through."""
    rules = (ROOT / "deploy" / f"{name}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert [rule for rule in rules if rule and rule[0] not in "#!"] == ["*", "**/__pycache__"]
    named = [rule[1:] for rule in rules if rule.startswith("!")]
    assert all((ROOT / path).exists() for path in named)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *named],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [Path(path) for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


@pytest.mark.parametrize("name", FILES)
def test_bases_are_pinned_and_the_container_runs_as_nobody_of_the_host(name: str) -> None:
    base = dict(value.split("=", 1) for value in values(name, "ARG") if "=" in value).get("BASE", "")
    bases = {rest.split()[0].replace("$BASE", base) for rest in values(name, "FROM")}
    assert len(bases) == 1
    tag = bases.pop().rpartition(":")[2]
    assert re.match(r"\d+\.\d+\.\d+-", tag)
    user = values(name, "USER")
    assert user == ["10001"]
    # Nothing follows that would run as another user.
    assert [word for word, _ in read_lines(name)][-3:] == ["USER", "WORKDIR", "CMD"]


@pytest.mark.parametrize("name", FILES)
def test_the_extras_exist_and_become_the_requirements_that_pip_would_find(name: str) -> None:
    arguments = dict(value.split("=", 1) for value in values(name, "ARG") if "=" in value)
    extras = arguments["EXTRAS"].split(",")
    listed = subprocess.run(
        [sys.executable, ROOT / "deploy" / "list_requirements.py", ROOT / "pyproject.toml", arguments["EXTRAS"]],
        capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    expected = set(project["dependencies"])
    for extra in [*extras, "train"]:  # campaign names train
        expected |= {
            found for found in project["optional-dependencies"][extra] if not found.startswith("precision-time[")
        }
    assert set(filter(None, listed)) == expected


def test_an_unknown_extra_is_refused_with_those_there_are() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "list_requirements.py", ROOT / "pyproject.toml", "campagne"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "got: campagne" in done.stderr
    assert "campaign" in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_pip_is_held_to_the_pins_and_leaves_no_cache(name: str) -> None:
    installs = [rest for rest in values(name, "RUN") if "pip install" in rest]
    assert len(installs) == 2
    assert all("--no-cache-dir" in line for line in installs)
    assert "--constraint constraints.txt" in installs[0]
    # The second installs the package alone.
    assert "--no-deps --no-build-isolation" in installs[1]
    copies = values(name, "COPY")
    assert copies[0].split() == ["pyproject.toml", "constraints.txt", "deploy/list_requirements.py", "./"]
    assert copies[1] == ". ."
    for line in values(name, "RUN"):
        if "apt-get" in line:
            assert "--no-install-recommends" in line
            assert line.endswith("rm -rf /var/lib/apt/lists/*")


@pytest.mark.parametrize("name", FILES)
def test_results_are_json_nothing_is_reported_and_no_secret_is_in_a_layer(name: str) -> None:
    environment = " ".join(values(name, "ENV"))
    for setting in (
        "PREFECT_RESULTS_DEFAULT_SERIALIZER=json",
        "PREFECT_SERVER_ANALYTICS_ENABLED=false",
        "DO_NOT_TRACK=1",
    ):
        assert setting in environment
    declared = environment + " ".join(values(name, "ARG"))
    assert not re.search(r"(?i)password|secret|token|auth|_key", declared)


@pytest.mark.parametrize("name", FILES)
def test_the_command_exists(name: str) -> None:
    (command,) = values(name, "CMD")
    program, *arguments = json.loads(command)
    scripts = {entry.name for entry in importlib.metadata.entry_points(group="console_scripts")}
    assert program in scripts
    done = subprocess.run([sys.executable, "-m", "precision_time", *arguments], capture_output=True, text=True)
    assert done.returncode == 0


def test_both_images_are_sent_the_same_and_differ_only_in_the_base_and_what_it_lacks() -> None:
    assert sent_files("Dockerfile") == sent_files("Dockerfile.cuda")
    differing = set(read_lines("Dockerfile")) ^ set(read_lines("Dockerfile.cuda"))
    assert {word for word, _ in differing} == {"FROM", "ARG", "RUN"}


def test_what_a_build_is_sent_is_the_whole_package_and_installs_by_the_same_command(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    for path in sent_files("Dockerfile"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    (install,) = [line for line in values("Dockerfile", "RUN") if "--no-deps" in line]
    words = install.split()
    assert words[:2] == ["pip", "install"]
    done = subprocess.run(
        [sys.executable, "-m", *words, "--quiet", "--disable-pip-version-check", "--target", installed],
        cwd=source, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    package = installed / "precision_time"
    assert (package / "predictor" / "data").is_dir()
    for folder in ("flows", "tasks", "predictor", "casgd", "storage"):
        wanted = {path.name for path in (ROOT / folder).glob("*.py")}
        assert {path.name for path in (package / folder).glob("*.py")} == wanted
    assert not (package / "tests").exists()
