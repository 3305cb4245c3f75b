"""Print what the extras of a pyproject.toml install, so that an image keeps that layer while only code changes.

``python list_requirements.py pyproject.toml campaign,s3``; an extra that names others of the project is followed.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def list_requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements of the project's base and ``extras``, each once; raises ``SystemExit`` for an unknown extra."""
    offered = project.get("optional-dependencies", {})
    own = re.compile(rf"{re.escape(project['name'])}\[([^\]]+)\]")
    found = dict.fromkeys(project["dependencies"])
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in offered:
            raise SystemExit(f"no such extra; got: {extra}; expected: {', '.join(sorted(offered))}")
        for requirement in offered[extra]:
            named = own.fullmatch(requirement)
            if named is None:
                found[requirement] = None
            else:
                waiting += [name.strip() for name in named[1].split(",")]
    return list(found)


if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    print("\n".join(list_requirements(project, [name for name in sys.argv[2].split(",") if name])))
