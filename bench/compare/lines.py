"""Counts what a user writes in each peer: lines of the agent that differ, and lines beside it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from .peers import PEERS, Peer

CODE = Path(__file__).parent / "code"
AGENT = "agent.py"
HEAD = (
    "| | version | lines of the agent: new, gone | Python beside it | settings, shell | in all |"
    " how it was checked |\n|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Lines:
    """`added`, `removed`: of the agent, against the one that nobody trains. `python`: of other
    modules; `settings`: of everything else."""

    added: int
    removed: int
    python: int
    settings: int

    @property
    def total(self) -> int:
        return self.added + self.python + self.settings


def counted(path: Path) -> list[str]:
    """Its lines, without blank ones and comments. Docstrings count: TRL and verl read them."""
    lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def changed(before: list[str], after: list[str]) -> tuple[int, int]:
    """How many lines of `after` are new, and how many of `before` are gone."""
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return len(after) - same, len(before) - same


def lines_of(peer: Peer, code: Path = CODE) -> Lines:
    before = counted(code / "before" / AGENT)
    python = settings = 0
    # A peer that has no use for the agent has no such file.
    after = before if peer.keeps_agent else []
    for path in sorted((code / peer.folder).iterdir()):
        if path.name == AGENT:
            after = counted(path)
        elif path.suffix == ".py":
            python += len(counted(path))
        elif path.is_file():
            settings += len(counted(path))
    return Lines(*changed(before, after), python, settings)


def table() -> str:
    rows = [HEAD]
    for peer in PEERS:
        found = lines_of(peer)
        link = f"[{peer.title}](../bench/compare/code/{peer.folder})"
        rows.append(
            f"| {link} | {peer.version} | {found.added}, {found.removed} | {found.python} |"
            f" {found.settings} | {found.total} | {peer.checked} |"
        )
    return "\n".join(rows)
