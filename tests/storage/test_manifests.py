"""The rules of publishing: one rule for names, and a manifest that must list exactly the files."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.manifests import ArtifactFile, ArtifactManifest
from precision_time.storage.registry import Registry

Publish = Callable[..., ArtifactManifest]
Describe = Callable[[int, tuple[ArtifactFile, ...]], ArtifactManifest]


@pytest.fixture
def local(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def edited(**changes: object) -> Callable[[dict[str, object]], bytes]:
    return lambda values: json.dumps({**values, **changes}).encode()


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: b"",
        lambda values: b"[" * 200_000,
        lambda values: b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
        lambda values: json.dumps(values)[:-1].encode() + b', "seed": 1}',
        lambda values: json.dumps(values).replace("0.1", "NaN").encode(),
        lambda values: json.dumps(values).replace("0.1", "1e400").encode(),
        lambda values: json.dumps(values).encode("utf-16"),
        lambda values: json.dumps(values).encode() + b" " * 1_000_000,
        lambda values: b"\x80\x04K\x01.",
        lambda values: b"[]",
        lambda values: b"null",
        edited(unknown=1),
        edited(seed="1"),
        edited(version="1"),
        edited(version=True),
        edited(name="../demo"),
        edited(files=[]),
        edited(files=None),
        edited(training_data_sha256="x"),
        lambda values: json.dumps({**values, "files": values["files"] * 2}).encode(),  # type: ignore[operator]
    ],
)
def test_a_manifest_that_is_not_one_is_refused(
    local: Registry, edit: Callable[[dict[str, object]], bytes], publish: Publish
) -> None:
    publish(local)
    path = Path(local.url) / "demo/1/manifest.json"
    path.write_bytes(edit(json.loads(path.read_bytes())))
    for act in (local.load, local.verify, local.manifest):
        with pytest.raises(IntegrityError, match=r"demo/1/manifest\.json|too large"):
            act("demo@1")


@pytest.mark.parametrize(
    "file",
    [
        {"path": "../canary"},
        {"path": "/etc/passwd"},
        {"path": "manifest.json"},
        {"path": "MANIFEST.json"},
        {"path": "a\n"},
        {"size_bytes": -1},
        {"size_bytes": 10**12},
        {"sha256": "F" * 64},
    ],
)
def test_a_manifest_cannot_name_a_file_outside_or_without_bounds(
    local: Registry, file: dict[str, object], publish: Publish
) -> None:
    publish(local)
    path = Path(local.url) / "demo/1/manifest.json"
    values = json.loads(path.read_bytes())
    values["files"][0].update(file)
    path.write_bytes(json.dumps(values).encode())
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        local.load("demo@1")


@pytest.mark.parametrize("version", [2, 99, 0, -1])
def test_a_manifest_of_another_schema_is_refused_with_both_versions(
    local: Registry, version: int, publish: Publish
) -> None:
    publish(local)
    path = Path(local.url) / "demo/1/manifest.json"
    values = json.loads(path.read_bytes())
    path.write_bytes(json.dumps({**values, "schema_version": version, "later_field": 1}).encode())
    with pytest.raises(IntegrityError, match=f"schema version {version}; expected: schema version 1"):
        local.load("demo@1")


def test_a_manifest_of_before_a_field_was_added_stays_sound_and_a_full_one_keeps_it(
    local: Registry, publish: Publish, describe_as: Callable[..., Describe]
) -> None:
    errors = {"fp32": {"predictor": {"n": 3.0, "mape": 0.1, "median_ape": None}}}
    local.publish("demo", {"a": b"1"}, describe=describe_as("demo", accuracy_by_precision=errors))
    assert local.manifest("demo@1").accuracy_by_precision == errors
    path = Path(local.url) / "demo/1/manifest.json"
    values = json.loads(path.read_bytes())
    for later in ("zoo_sha256", "known_limits", "accuracy_by_precision", "manifest_sha256"):
        del values[later]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_bytes(json.dumps({**values, "manifest_sha256": digest}).encode())
    earlier = local.manifest("demo@1")
    assert (earlier.zoo_sha256, earlier.known_limits, earlier.accuracy_by_precision) == ("", [], {})
    changed = {"fp32": {"predictor": {"n": 4.0, "mape": 0.1, "median_ape": None}}}
    path.write_bytes(json.dumps({**values, "manifest_sha256": digest, "accuracy_by_precision": changed}).encode())
    with pytest.raises(IntegrityError, match="not what was published"):
        local.manifest("demo@1")


# --- names

BAD_NAMES = [
    "",
    ".",
    "..",
    "/etc",
    "a/../../b",
    "a/b",
    "%2e%2e%2f",
    "%252e%252e%252f",
    "a%2fb",
    "a\\b",
    "C:x",
    "a\0b",
    "a\nb",
    "a\n",
    "a#b",
    "a?b",
    "a b",
    "a ",
    " a",
    "a.",
    "a-",
    ".a",
    "_a",
    "-a",
    "a..b",
    "x" * 65,
    "x" * 300,
    "a\u202eb",
    "Demo",
    "DEMO",
    "é",
    "\u0661",  # a digit of another script
    "a::b",
    "file:///etc/passwd",
    "http://localhost/x",
    "<script>",
    "=cmd|",
]


@pytest.fixture(scope="module")
def opened() -> Iterator[list[str]]:
    """Paths opened since the test emptied the list. One hook for all tests, because a hook cannot be removed."""
    read: list[str] = []
    active = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if active and event == "open":
            read.append(str(args[0]))

    sys.addaudithook(hook)
    yield read
    active = False


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_bad_name_is_one_error_and_opens_nothing(
    local: Registry, name: str, opened: list[str], publish: Publish
) -> None:
    acts = [
        lambda: publish(local, name),
        lambda: local.resolve(name),
        lambda: local.load(name),
        lambda: local.load(f"{name}@1"),
        lambda: local.load(f"{name}@champion"),
        lambda: local.verify(name),
        lambda: local.manifest(name),
        lambda: local.versions(name),
        lambda: local.aliases(name),
        lambda: local.set_alias(name, "champion", 1),
        lambda: local.roll_back(name),
        lambda: local.set_alias("demo", name, 1) if name != "a-" else local.load(name),
        lambda: local.roll_back("demo", name) if name != "a-" else local.load(name),
        lambda: publish(local, alias=name) if name != "a-" else local.load(name),
    ]
    opened.clear()
    for act in acts:
        with pytest.raises(InputError) as caught:
            act()
        assert caught.value.code == "E-INPUT"
        assert caught.value.exit_code == 2
    assert [path for path in opened if not path.endswith((".py", ".pyc"))] == []


@pytest.mark.parametrize(
    "reference", ["demo@", "demo@0", "demo@01", "demo@-1", "demo@1.0", "demo@1@2", "demo@\u0661", "demo@9999999999",
                  "demo@Champion", "demo@1/../2", "@1", "demo @1"]
)  # fmt: skip
def test_a_bad_reference_is_refused(local: Registry, reference: str, publish: Publish) -> None:
    publish(local)
    with pytest.raises(InputError):
        local.load(reference)


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", 10**9])
def test_a_bad_version_is_refused(local: Registry, version: object, publish: Publish) -> None:
    with pytest.raises(InputError):
        publish(local, version=version)
    with pytest.raises(InputError):
        local.set_alias("demo", "champion", version)  # type: ignore[arg-type]
    assert local.names() == []


# --- what cannot be published


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"x": b""},
        {"x": "text"},
        {"x": None},
        {"": b"1"},
        {"../x": b"1"},
        {"a/b": b"1"},
        {".hidden": b"1"},
        {"_private": b"1"},
        {"manifest.json": b"1"},
        {"Manifest.json": b"1"},
        {"x\n": b"1"},
        {"x" * 101: b"1"},
        {"a": b"1", "A": b"2"},
        {3: b"1"},
        {f"f{number}": b"1" for number in range(101)},
    ],
    ids=lambda files: repr(files)[:30],
)
def test_files_that_could_not_be_loaded_are_not_published(
    local: Registry, files: dict[str, bytes], publish: Publish
) -> None:
    with pytest.raises(InputError):
        publish(local, files=files)
    assert not os.path.exists(local.url)


@pytest.mark.parametrize(
    "make",
    [
        lambda describe_as: describe_as("other"),
        lambda describe_as: describe_as("demo", version=2),
        lambda describe_as: describe_as("demo", files=()),
        lambda describe_as: lambda version, files: describe_as("demo")(version, files[:1]),
        lambda describe_as: lambda version, files: describe_as("demo")(version, (*files, files[0])),
        lambda describe_as: (
            lambda version, files: describe_as("demo")(
                version, (files[0].model_copy(update={"sha256": "1" * 64}), *files[1:])
            )
        ),
        lambda describe_as: describe_as("demo", accuracy={"cv": {"predictor": {"mape": float("nan")}}}),
        lambda describe_as: describe_as("demo", created_at="x" * 2_000_000),
    ],
)
def test_a_manifest_that_does_not_list_exactly_the_files_is_not_published(
    local: Registry,
    publish: Publish,
    describe_as: Callable[..., Describe],
    make: Callable[[Callable[..., Describe]], Describe],
) -> None:
    publish(local, "other")
    with pytest.raises(InputError):
        local.publish("demo", {"a": b"1", "b": b"2"}, describe=make(describe_as))
    assert local.versions("demo") == []
    # The version is free again.
    assert publish(local).version == 1


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "a/b",
        "plots/",
        "plots/.x",
        "plots/a/b",
        "../x",
        ".hidden",
        "_x",
        "a b",
        "a\n",
        "é",
        "x" * 101,
        "C:x",
    ],
)
def test_a_file_name_of_an_artifact_follows_one_pattern(path: str) -> None:
    with pytest.raises(ValidationError):
        ArtifactFile(path=path, size_bytes=1, sha256="0" * 64)
