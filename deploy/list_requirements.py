"""Print the requirements of some extras of a pyproject.toml, so that an image keeps their layer while code changes.

``python list_requirements.py pyproject.toml campaign,s3``; extras of the project that an extra names are included.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def list_requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements of the project's base and ``extras``, each once; raises ``SystemExit`` for an unknown extra."""
    known = project.get("optional-dependencies", {})
    own_extras = re.compile(rf"{re.escape(project['name'])}\[([^\]]+)\]")
    requirements = dict.fromkeys(project["dependencies"])
    waiting, done = list(extras), set()
    while waiting:
        extra = waiting.pop(0)
        if extra in done:
            continue
        done.add(extra)
        if extra not in known:
            raise SystemExit(f"no such extra; got: {extra}; expected: {', '.join(sorted(known))}")
        for requirement in known[extra]:
            named = own_extras.fullmatch(requirement)
            if named is None:
                requirements[requirement] = None
            else:
                waiting += [name.strip() for name in named[1].split(",")]
    return list(requirements)


if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    print("\n".join(list_requirements(project, [name for name in sys.argv[2].split(",") if name])))
