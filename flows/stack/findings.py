"""What ``precision-time doctor`` found: each finding with its evidence and what to do about it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

__all__ = ["Finding", "describe_findings", "fine", "is_loopback", "problem", "warning"]

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: what is so, how that is known, and the fix where it is not fine."""

    topic: str
    level: Level
    what: str
    evidence: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def fine(topic: str, what: str, evidence: str = "") -> Finding:
    """Nothing to do."""
    return Finding(topic=topic, level="ok", what=what, evidence=evidence)


def warning(topic: str, what: str, *, evidence: str = "", fix: str) -> Finding:
    """Works, and may surprise."""
    return Finding(topic=topic, level="warning", what=what, evidence=evidence, fix=fix)


def problem(topic: str, what: str, *, evidence: str = "", fix: str) -> Finding:
    """Does not work, or is open to whom it should not be."""
    return Finding(topic=topic, level="problem", what=what, evidence=evidence, fix=fix)


def describe_findings(findings: Sequence[Finding]) -> str:
    """A block of lines for each, problems last, where they are read."""
    order = {"ok": 0, "warning": 1, "problem": 2}
    lines = []
    for found in sorted(findings, key=lambda one: order[one.level]):
        evidence = f" ({found.evidence})" if found.evidence else ""
        lines.append(f"{found.level:<8} {found.topic}: {found.what}{evidence}")
        if found.fix:
            lines.append(f"{'':<8} fix: {found.fix}")
    problems = sum(found.level == "problem" for found in findings)
    warnings = sum(found.level == "warning" for found in findings)
    return "\n".join([*lines, f"{problems} problems, {warnings} warnings, {len(findings)} findings"])


def is_loopback(url: str) -> bool:
    """Whether the host of ``url`` is this machine, reached without a network."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
