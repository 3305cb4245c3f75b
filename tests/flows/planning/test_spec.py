"""Campaign files: accepted values, refusals and their words, and the grid that a file makes."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from precision_time.flows.ground.settings_file import MAX_BYTES, parse_duration, read_document
from precision_time.flows.planning.spec import MAX_CELLS, CampaignSpec, CellPattern, read_campaign
from precision_time.storage.errors import InputError, NotFoundError

GOOD = """\
name: first-light
models: [mlp, gpt2_mini]
precisions: [fp32, bf16-mixed]
gpus: [1, 2]
batch_sizes: [8, 4]
"""


def write(folder: Path, text: str, name: str = "campaign.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, name: str = "campaign.yaml") -> str:
    with pytest.raises(InputError) as caught:
        read_campaign(write(folder, text, name))
    assert caught.value.exit_code == 2
    return str(caught.value)


def make_spec(**changes: object) -> CampaignSpec:
    values = {"name": "a", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [8]}
    return CampaignSpec.model_validate(values | changes)


def test_a_campaign_file_becomes_its_grid(tmp_path: Path) -> None:
    spec = read_campaign(write(tmp_path, GOOD))
    assert spec.precisions == ("fp32", "amp_bf16")
    assert len(spec.cells()) == 16
    assert {cell.label for cell in spec.cells()} >= {"mlp fp32 x1 b4", "gpt2_mini amp_bf16 x2 b8"}


def test_yaml_toml_and_json_say_the_same(tmp_path: Path) -> None:
    values = {"name": "a", "models": ["mlp"], "precisions": ["16-mixed"], "gpus": [2], "batch_sizes": [8]}
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items())
    specs = [
        read_campaign(write(tmp_path, text, name))
        for text, name in [(toml, "c.toml"), (yaml, "c.yml"), (json.dumps(values), "c.json")]
    ]
    assert specs[0] == specs[1] == specs[2] == CampaignSpec.model_validate(values)


def test_cells_come_by_model_small_first_with_their_precisions_side_by_side(tmp_path: Path) -> None:
    labels = [cell.label for cell in read_campaign(write(tmp_path, GOOD)).cells()]
    assert labels[:4] == ["mlp fp32 x1 b4", "mlp amp_bf16 x1 b4", "mlp fp32 x1 b8", "mlp amp_bf16 x1 b8"]
    assert labels[8:] == [label.replace("mlp", "gpt2_mini") for label in labels[:8]]


def test_excluded_cells_are_left_out(tmp_path: Path) -> None:
    spec = read_campaign(write(tmp_path, GOOD + "exclude:\n- {model: gpt2_mini, gpus: 2}\n- {precision: amp_bf16}\n"))
    assert len(spec.cells()) == 6
    assert all(cell.precision == "fp32" for cell in spec.cells())


def test_a_pattern_matches_only_cells_that_agree_in_every_key() -> None:
    cell = make_spec().cells()[0]
    assert CellPattern(model="mlp", gpus=1).matches(cell)
    assert not CellPattern(model="mlp", gpus=2).matches(cell)


def test_words_that_yaml_would_turn_into_booleans_stay_words(tmp_path: Path) -> None:
    text = GOOD.replace("[fp32, bf16-mixed]", "[no, bf16]")
    assert read_campaign(write(tmp_path, text)).precisions == ("fp32", "bf16")
    assert read_document(write(tmp_path, "a: on\nb: no\nc: 010\nd: 0x10\ne: 2026-01-02\n")).values == {
        "a": "on", "b": "no", "c": "010", "d": "0x10", "e": "2026-01-02"
    }  # fmt: skip


def test_options_of_the_command_line_replace_keys_and_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert read_campaign(path, overrides={"device": "cpu"}).device == "cpu"
    with pytest.raises(InputError, match="device"):
        read_campaign(path, overrides={"device": "tpu"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("models: [mlp, resnet5]", ["line 2", "models[1]", "unknown model", "resnet5", "resnet50, resnet18"]),
        ("models: [mlp, ':f']", ["models[1]", "package.module:factory"]),
        ("models: [mlp, mlp]", ["models", "twice", "mlp"]),
        ("models: mlp", ["models", "not a list"]),
        ("models: []", ["models", "empty"]),
        ("models:", ["models", "not a list", "None"]),
        ("precisions: [fp17]", ["line 3", "precisions[0]", "fp17", "nearest are fp16"]),
        ("precisions: [16-mixed, amp_fp16]", ["precisions", "twice", "amp_fp16"]),
        ("precisions: [true]", ["precisions[0]", "True"]),
        ("gpus: [0]", ["line 4", "gpus[0]", "got: 0", "whole number from 1"]),
        ("gpus: [1, -2]", ["gpus[1]", "-2"]),
        ("gpus: [true]", ["gpus[0]", "True"]),
        ("gpus: [2.0]", ["gpus[0]", "2.0"]),
        ("gpus: ['2']", ["gpus[0]", "'2'"]),
        ("gpus: [99999999999999999999999]", ["gpus[0]", "whole number"]),
        ("gpus: [.inf]", ["gpus[0]", ".inf"]),
        ("gpus: [1, 1]", ["gpus", "twice"]),
        ("batch_sizes: [0]", ["line 5", "batch_sizes[0]"]),
    ],
)
def test_a_bad_value_is_named_with_its_line(tmp_path: Path, changed: str, words: list[str]) -> None:
    key = changed.split(":")[0]
    lines = [changed if line.startswith(key) else line for line in GOOD.splitlines()]
    message = refusal(tmp_path, "\n".join(lines))
    assert all(word in message for word in ["campaign.yaml", *words]), message


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("seconds_per_cell: 12:30:00", ["line 6", "12:30:00", "12h30m", "quotes"]),
        ("seconds_per_cell: 0", ["seconds_per_cell", "greater than 0"]),
        ("seconds_per_cell: -5", ["seconds_per_cell", "-5"]),
        ("seconds_per_cell: 2h", ["seconds_per_cell", "3600"]),
        ("seconds_per_cell: fast", ["seconds_per_cell", "not a duration", '"90s"']),
        ("timeout_per_cell: 10s", ["timeout_per_cell", "60 s"]),
        ("warmup_steps: 0", ["warmup_steps"]),
        ("measured_steps: 1.5", ["measured_steps", "1.5"]),
        ("memory_limit_bytes: 12", ["memory_limit_bytes"]),
        ("max_attempts: 99", ["max_attempts", "10"]),
        ("retrain_after: true", ["retrain_after", "nowhere to publish", "registry:"]),
        ("retrain_after: 'yes'\nregistry: r", ["retrain_after", "yes"]),
        ("max_hours: 0", ["max_hours", "greater than 0"]),
        ("max_cells: 1.5", ["max_cells"]),
        ("max_failures: 0", ["max_failures"]),
        ("budget_cells: 0", ["budget_cells"]),
        ("cells_at_once: 1000", ["cells_at_once", "256"]),
        ("device: gpu", ["device", "'cpu'"]),
        ("gpu: [1]", ["line 6", "gpu is not a known key", "nearest is gpus"]),
        ("precison: fp32", ["precison", "nearest is precisions"]),
        ("exclude: [{modle: mlp}]", ["exclude[0].modle", "nearest is model"]),
        ("exclude: [{model: gpt2}]", ["exclude[0] matches no cell", "gpt2"]),
        ("exclude: [{}]", ["exclude[0]", "everything"]),
        ("exclude: [{gpus: 1}, {gpus: 2}]", ["grid is empty"]),
        ("name: again", ["line 6", "twice", "name"]),
        ("x: !!python/object/apply:os.system [ls]", ["line 6", "tag"]),
        ("x: {<<: {a: 1}}", ["x is not a known key"]),
        ("---\nname: other", ["line 6", "more than one document"]),
        ("x:\n\ty: 1", ["line 7", "not YAML"]),
        ("x: " + "[" * 5000, ["nested too deeply"]),
        ("x: &a [*a]", ["too large when its aliases are followed"]),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
            ["aliases"],
        ),
    ],
)
def test_a_bad_key_is_named_with_what_to_do(tmp_path: Path, added: str, words: list[str]) -> None:
    message = refusal(tmp_path, f"{GOOD}{added}\n")
    assert all(word in message for word in ["campaign.yaml", *words]), message


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "name: a\nmodels: [resnet5]\nprecisions: [fp17]\ngpus: [0]\n")
    assert "4 problems" in message
    assert all(word in message for word in ["resnet5", "fp17", "gpus[0]", "batch_sizes is missing"])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", '{"name": "a", "name": "b"}', ["twice", "name"]),
        ("c.json", '{"name": NaN}', ["NaN"]),
        ("c.json", '{"name": 1e400}', ["name is not a finite number"]),
        ("c.json", '{"name": ' + "9" * 5000 + "}", ["number"]),
        ("c.json", "[" * 200_000, ["nested too deeply"]),
        ("c.json", '{"name":', ["line 1", "not JSON"]),
        ("c.json", "[1]", ["list", "keys with values"]),
        ("c.yaml", "", ["empty file"]),
        ("c.yaml", "just words", ["str", "keys with values"]),
        ("c.yaml", "a\0b: 1", ["not YAML"]),
        ("c.yaml", "? [a]\n: 1", ["line 1", "a key that is not text"]),
        ("c.toml", "seconds_per_cell = 12:30:00", ["seconds_per_cell", "12h30m"]),
        ("c.toml", "name = 2026-01-02", ["name is a date"]),
        ("c.toml", "name = ", ["not TOML"]),
        ("c.toml", "a = 1\na = 2", ["not TOML"]),
        ("c.toml", "a = inf", ["not a finite number"]),
        ("c.toml", f"a = {'[' * 5000}", ["nested too deeply"]),
        ("c.ini", "name=a", [".ini", ".yaml"]),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    message = refusal(tmp_path, text, name)
    assert all(word in message for word in words), message


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none\\.yaml"):
        read_campaign(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(InputError, match="not a regular file"):
        read_campaign(tmp_path / "folder.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_campaign(tmp_path / "bytes.yaml")
    assert "too large" in refusal(tmp_path, "#" * (MAX_BYTES + 1))


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    message = refusal(tmp_path, GOOD + '"\\e[2J\\nred": 1\n')
    assert message.isprintable()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0), (0.5, 0.5), ("90", 90.0), ("90s", 90.0), ("2m", 120.0), ("1h30m", 5400.0), ("1h 30m", 5400.0),
        ("1.5h", 5400.0), ("500ms", 0.5), ("1d", 86400.0), ("12:30:00", 45000.0), ("00:01:30", 90.0), ("2M", 120.0),
    ],
)  # fmt: skip
def test_durations_are_read_as_written(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", [True, None, -1, "-1s", "", "s", "1x", "12:30", "1:75:00", "1m1m", "1e999", float("nan"), float("inf"), []]
)
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(InputError, match="not a duration"):
        parse_duration(text)


def test_an_own_model_is_named_by_module_and_factory() -> None:
    assert make_spec(models=["my.models:make_net"]).models == ("my.models:make_net",)


def test_a_huge_grid_is_refused_and_a_large_one_is_expanded() -> None:
    wide = {"gpus": list(range(1, 1001)), "precisions": ["fp32", "bf16"]}
    with pytest.raises(ValidationError, match="grid is too large"):
        make_spec(**wide, batch_sizes=list(range(1, MAX_CELLS // 1000 + 1)))
    assert len(make_spec(**wide, batch_sizes=list(range(1, 11))).cells()) == 20_000


def test_a_spec_survives_the_json_of_a_prefect_parameter() -> None:
    spec = make_spec(exclude=[], memory_limit_bytes=2**30)
    assert CampaignSpec.model_validate_json(spec.model_dump_json()) == spec


def test_every_field_of_the_form_has_a_title() -> None:
    fields = CampaignSpec.model_json_schema()["properties"]
    assert all("title" in entry and "description" in entry for entry in fields.values())


@given(st.text(max_size=200))
def test_no_text_makes_the_reader_fail_in_another_way(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzz.yaml"
    path.write_bytes((GOOD + text).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(InputError):
        read_campaign(path)


def test_options_of_the_run_are_axes_of_the_grid(tmp_path: Path) -> None:
    text = GOOD + "channels_last: [false, true]\ncheckpointing: [none, full]\nstrategies: [ddp, fsdp]\n"
    spec = read_campaign(write(tmp_path, text))
    assert len(spec.cells()) == 8 * 16
    labels = {cell.label for cell in spec.cells()}
    assert {"mlp fp32 x1 b4", "mlp fp32 x1 b4 channels-last", "mlp fp32 x2 b8 fsdp full-checkpointing"} <= labels
    assert CampaignSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_campaign_that_names_no_option_has_the_cells_it_always_had() -> None:
    cell = make_spec(compiled=[True, False], fused_optimizer=[False], compression=["none"]).cells()[-1]
    assert cell == make_spec().cells()[0]


def test_options_can_be_excluded() -> None:
    spec = make_spec(
        gpus=[1, 2], compression=["none", "bf16"], exclude=[CellPattern(gpus=1, compression="bf16")]
    )  # fmt: skip
    assert [(cell.world_size, cell.compression) for cell in spec.cells()] == [(1, "none"), (2, "none"), (2, "bf16")]
    only = make_spec(compiled=[False, True], exclude=[{"compiled": False}])
    assert [cell.compiled for cell in only.cells()] == [True]


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("channels_last: [1]", ["channels_last[0]", "one of false, true"]),
        ("compiled: ['yes']", ["compiled[0]", "yes"]),
        ("compiled: true", ["compiled", "not a list"]),
        ("checkpointing: [some]", ["checkpointing[0]", "none, full"]),
        ("compression: [fp8]", ["compression[0]", "none, fp16, bf16"]),
        ("fused_optimizer: [true, true]", ["fused_optimizer", "twice"]),
        ("strategies: ['']", ["strategies[0]"]),
        ("exclude: [{checkpointing: full}]", ["exclude[0] matches no cell", "checkpointing: full"]),
    ],
)
def test_a_bad_option_is_named(tmp_path: Path, added: str, words: list[str]) -> None:
    message = refusal(tmp_path, f"{GOOD}{added}\n")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("cluster", ["auto", "local", "slurm", "tcp://10.0.0.1:8786", "tls://[::1]:8786"])
def test_a_cluster_is_named_or_an_address(cluster: str) -> None:
    assert make_spec(cluster=cluster).cluster == cluster


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("cluster: slrum", ["unknown cluster", "slurm, local-cuda"]),
        ("cluster: tcp://host", ["not the address of a scheduler", "tcp://host:port"]),
        ("cluster: 'tcp://user:word@host:1'", ["not the address of a scheduler"]),
        ("cluster: local\ndevice: cuda", ["cluster and device do not fit", "local-cuda with cuda"]),
        ("cluster: local-cuda\ndevice: cpu", ["cluster and device do not fit"]),
        ("slurm: {partition: a}", ["slurm has options for another cluster"]),
        ('cluster: slurm\nslurm: {directives: ["-p a\\nrm -r /"]}', ["one line of plain text"]),
        ("gpus: [3]\ngpus_per_node: 2", ["do not divide over the nodes", "gpus: 3"]),
        ("workers_timeout: 0", ["workers_timeout"]),
        ("cluster: slurm\nslurm: {partiton: a}", ["slurm.partiton is not a known key", "nearest is partition"]),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, added: str, words: list[str]) -> None:
    text = GOOD.replace("gpus: [1, 2]\n", "") if added.startswith("gpus") else GOOD
    message = refusal(tmp_path, f"{text}{added}\n")
    assert all(word in message for word in words), message


def test_wide_cells_spread_over_hosts_only_where_it_is_asked_for() -> None:
    assert {cell.nodes for cell in make_spec(gpus=[1, 16, 64]).cells()} == {1}
    spread = make_spec(gpus=[1, 8, 16, 64], gpus_per_node=8).cells()
    assert [(cell.world_size, cell.nodes) for cell in spread] == [(1, 1), (8, 1), (16, 2), (64, 8)]


def test_the_campaigns_that_come_along_are_sound() -> None:
    folder = Path(__file__).parents[3] / "deploy" / "campaigns"
    grids = {path.name: read_campaign(path).cells() for path in sorted(folder.glob("*.yaml"))}
    assert len(grids["paper-grid.yaml"]) == 4 * 4 * 7 * 3
    assert {cell.nodes for cell in grids["paper-grid.yaml"] if cell.world_size == 64} == {8}


def test_what_is_no_strategy_is_refused_with_those_there_are() -> None:
    with pytest.raises((InputError, ValidationError), match="fsdp"):
        make_spec(strategies=["foo"])
