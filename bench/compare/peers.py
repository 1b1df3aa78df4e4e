"""The peers of docs/compare.md: which version, and how the code for it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

READ = "read"
NAMES = "names checked in the wheel's source"
IMPORTED = "imported, names checked"
RUN = "run in a unit test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`folder`: in `code/`. `version`: of the package, or the repository's commit. `wheel`: its
    name in the registry, where names are looked up in its source. `objects`: variable in the code
    -> the class, as module:name, whose methods are called on it. `keeps_agent`: the one that nobody
    trains is used as it is."""

    folder: str
    title: str
    version: str
    checked: str
    wheel: str | None = None
    objects: Mapping[str, str] = field(default_factory=dict)
    keeps_agent: bool = False


PEERS = (
    Peer(
        folder="tracegrad", title="tracegrad", version="this commit", checked=RUN, keeps_agent=True
    ),
    Peer(
        folder="agent_lightning",
        title="Agent-lightning",
        version="1.0.2",
        checked=NAMES,
        wheel="agentlightning",
    ),
    Peer(
        folder="art",
        title="ART",
        version="0.5.23",
        checked=NAMES,
        wheel="openpipe-art",
        objects={
            "backend": "art.local:LocalBackend",
            "model": "art:TrainableModel",
            "trajectory": "art:Trajectory",
        },
    ),
    Peer(folder="rllm", title="rLLM", version="9beb6e0f", checked=READ),
    Peer(
        folder="polar",
        title="Polar",
        version="063c9482 and near it",
        checked=READ,
        keeps_agent=True,
    ),
    Peer(folder="trl", title="TRL", version="1.16.0", checked=IMPORTED),
    Peer(folder="verl", title="verl", version="0.9.1", checked=NAMES, wheel="verl"),
)
