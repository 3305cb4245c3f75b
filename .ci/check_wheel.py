"""Build wheel and sdist from what git knows, and predict with the result in an environment that holds nothing else."""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "precision_time"
FOLDERS = {"flows", "tasks", "predictor", "casgd", "storage"}
# Folders whose files are part of the package beside their code, by ending.
TABLES_OF = {"casgd": (".cu",), "tasks/zoo": (".csv",), "tasks/zoo/libraries": (".csv", ".toml")}
DATA = "predictor/data/"
BUNDLE = f"{DATA}bundled/"
BUNDLED = {"manifest.json", "predictor.json", "trees.npz", "report.md"}
#: Only where a campaign's timings were trained on too.
MAY_BE_BUNDLED = {"workloads.json", "hardware.json"}
MAX_BUNDLE_BYTES = 5 * 10**6
QUESTION = (
    "from precision_time import predict_time; "
    "estimate = predict_time(model='resnet50', precision='mixed_fp16_fp32', gpus=8, batch_size=256); "
    "print(estimate); "
    "assert estimate.artifact_id and estimate.artifact_id.startswith('bundled@'), estimate.artifact_id"
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
COMMANDS = (
    ("--version",),
    ("--help",),
    ("predict", "--model", "resnet50", "--precision", "mixed_fp16_fp32", "--gpus", "8", "--batch-size", "256"),
)


def fail(what: str) -> None:
    sys.exit(f"wheel check: {what}")


def call(*command: str | Path, cwd: Path, env: dict[str, str] | None = None, expected: int = 0) -> str:
    """Run a command and return its stdout, or its stderr where it has to fail; another exit code ends the check."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != expected:
        fail(f"exit code {done.returncode} from {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stderr if expected else done.stdout


def sources() -> list[str]:
    """What a commit would hold: tracked files and new ones that are not ignored."""
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def copy_sources(target: Path) -> list[str]:
    # A copy has no stale build/ and no stale egg-info, both of which put removed modules into the next wheel.
    names = sources()
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return names


def belongs(name: str) -> bool:
    """Whether a source file is part of the package."""
    folder, _, rest = name.rpartition("/")
    if name.startswith(DATA) or name == "py.typed":
        return True
    return (rest.endswith(".py") and (not folder or folder.partition("/")[0] in FOLDERS)) or (
        rest.endswith(TABLES_OF.get(folder, ()))
    )


def check_bundle(sizes: dict[str, int]) -> None:
    """One version of the bundled artifact, all that answers and nothing else, below its limit."""
    inside = {name.removeprefix(BUNDLE): size for name, size in sizes.items() if name.startswith(BUNDLE)}
    if not inside:
        fail(f"no bundled artifact in {BUNDLE}; `make bundle` builds it")
    versions = {name.partition("/")[0] for name in inside}
    files = {name.partition("/")[2] for name in inside}
    if len(versions) != 1 or not BUNDLED <= files <= BUNDLED | MAY_BE_BUNDLED:
        fail(f"{BUNDLE} holds {sorted(inside)}; expected one version with {sorted(BUNDLED)}")
    total = sum(inside.values())
    if total > MAX_BUNDLE_BYTES:
        fail(f"the bundled artifact takes {total} bytes; at most {MAX_BUNDLE_BYTES}")
    print(f"bundled artifact: version {versions.pop()}, {total} bytes")


def check_contents(wheel: Path, names: list[str]) -> dict[str, int]:
    """Compare the wheel with the sources; return its members with their checksums, the metadata folder aside."""
    with zipfile.ZipFile(wheel) as archive:
        members = {entry.filename: entry.CRC for entry in archive.infolist()}
        check_bundle({entry.filename.removeprefix(f"{PACKAGE}/"): entry.file_size for entry in archive.infolist()})
    tops = {name.partition("/")[0] for name in members if ".dist-info/" not in name}
    if tops != {PACKAGE}:
        fail(f"top-level names are {sorted(tops)}; expected {PACKAGE} alone")
    packed = {name for name in names if belongs(name)}
    inside = {name.removeprefix(f"{PACKAGE}/"): crc for name, crc in members.items() if ".dist-info/" not in name}
    if missing := packed - set(inside):
        fail(f"not in the wheel: {sorted(missing)}")
    if extra := set(inside) - packed:
        fail(f"in the wheel and should not be: {sorted(extra)}")
    if not any(name.endswith("/licenses/LICENSE") for name in members):
        fail("the licence is not in the wheel")
    return inside


def build(here: Path) -> Path:
    """Build the wheel from the sources and again from their sdist, compare them, and return the latter."""
    tree, direct, indirect = (here / name for name in ("tree", "direct", "indirect"))
    names = copy_sources(tree)
    make_wheel = (*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
    call(*make_wheel, direct, tree, cwd=here)
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", here, tree, cwd=here)
    (sdist,) = here.glob("*.tar.gz")
    call(*make_wheel, indirect, sdist, cwd=here)
    (wheel,) = direct.glob("*.whl")
    (wheel_of_sdist,) = indirect.glob("*.whl")
    inside = check_contents(wheel, names)
    if check_contents(wheel_of_sdist, names) != inside:
        fail("the sdist builds another wheel than the checkout")
    print(f"{wheel.name}: {len(inside)} files; the sdist builds the same")
    return wheel_of_sdist


def try_out(wheel: Path, here: Path) -> None:
    """Install the wheel with the base dependencies alone, and use it from a folder with nothing but decoys."""
    venv.create(here / "venv", with_pip=False)
    python, script = (here / "venv" / "bin" / name for name in ("python", "precision-time"))
    call(*PIP, "--python", python, "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=here)

    empty = here / "empty"
    for name in FOLDERS:
        (empty / name).mkdir(parents=True)
        (empty / name / "__init__.py").write_text("raise ImportError('a decoy was imported')\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PRECISION_"))}
    environment["HOME"] = str(empty)
    print(call(python, "-c", QUESTION, cwd=empty, env=environment))
    for words in COMMANDS:
        call(script, *words, cwd=empty, env=environment)
    if left := {path.name for path in empty.iterdir()} - FOLDERS:
        fail(f"a prediction wrote {sorted(left)} into the caller's directory")

    (empty / "campaign.yaml").write_text("name: base-install\n")
    message = call(script, "campaign", "campaign.yaml", cwd=empty, env=environment, expected=2)
    if "pip install 'precision-time[campaign]'" not in message:
        fail(f"a campaign without its extra is not told how to get it: {message}")


def main() -> None:
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as folder:
        try_out(build(Path(folder)), Path(folder))
    print("wheel check: passed")


if __name__ == "__main__":
    main()
