"""What `doctor` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Of one check so many findings are named; the rest are counted.
MAX_NAMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`check` is a stable name. `broken`: what is stored is not what was written, or never will
    be used as it should; else it is worth knowing. `subject` names what it is about."""

    check: str
    message: str
    fix: str
    subject: str = ""
    broken: bool = True
    count: int = 1
    fixed: bool = False


def truncate_findings(findings: Iterable[Finding], named: int = MAX_NAMED) -> Iterator[Finding]:
    """The first of each check, and how many more there are."""
    seen: Counter[str] = Counter()
    more: dict[str, Finding] = {}
    for finding in findings:
        seen[finding.check] += 1
        if seen[finding.check] <= named:
            yield finding
        else:
            more.setdefault(finding.check, finding)
    for check, finding in more.items():
        count = seen[check] - named
        yield Finding(
            check=check,
            message=f"{count:,} more of these",
            fix=finding.fix,
            broken=finding.broken,
            count=count,
        )
