"""The findings of ``precision-time doctor``: each with its evidence and what to do about it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "describe_findings", "fine", "problem", "warning"]

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check: what is so, the evidence, and the fix where something is wrong."""

    topic: str
    level: Level
    what: str
    evidence: str = ""
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def fine(topic: str, what: str, evidence: str = "") -> Finding:
    """Nothing needs to be done."""
    return Finding(topic=topic, level="ok", what=what, evidence=evidence)


def warning(topic: str, what: str, *, evidence: str = "", fix: str) -> Finding:
    """It works, but may surprise."""
    return Finding(topic=topic, level="warning", what=what, evidence=evidence, fix=fix)


def problem(topic: str, what: str, *, evidence: str = "", fix: str) -> Finding:
    """It does not work, or is not secured."""
    return Finding(topic=topic, level="problem", what=what, evidence=evidence, fix=fix)


def describe_findings(findings: Sequence[Finding]) -> str:
    """A line or two for each finding, problems last, next to the prompt."""
    order = {"ok": 0, "warning": 1, "problem": 2}
    lines = []
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        evidence = f" ({finding.evidence})" if finding.evidence else ""
        lines.append(f"{finding.level:<8} {finding.topic}: {finding.what}{evidence}")
        if finding.fix:
            lines.append(f"{'':<8} fix: {finding.fix}")
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    return "\n".join([*lines, f"{problems} problems, {warnings} warnings, {len(findings)} findings"])
