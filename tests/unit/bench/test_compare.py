"""docs/compare.md: its figures are counted, its links lead somewhere, the code in it is right."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from bench.compare.__main__ import BLOCK, PAGE
from bench.compare.lines import CODE, changed, counted, lines_of, table
from bench.compare.peers import PEERS, Peer

import tracegrad
from support.compare.names import Source, Use, uses_of
from support.compare.wheels import wheel_source
from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.runner_proxy import runner_proxy

TEXT = PAGE.read_text(encoding="utf-8")
OF_A_WHEEL = [peer for peer in PEERS if peer.wheel]


def test_the_figures_are_those_of_the_code() -> None:
    [block] = BLOCK.findall(TEXT)
    assert block == table(), "run `python -m bench.compare`"


def test_each_peer_has_its_column_and_its_section() -> None:
    heads = re.findall(r"^\| (?:what is captured|what is lost) \| (.+) \|$", TEXT, re.M)
    assert [head.split(" | ") for head in heads] == [[peer.title for peer in PEERS]] * 2
    sections = re.findall(r"^### (.+)$", TEXT, re.M)
    assert sections == [peer.title for peer in PEERS if peer.folder != "tracegrad"]
    for peer in PEERS:
        assert peer.version in TEXT.split("<!-- /lines -->")[1] or peer.folder == "tracegrad"


def test_every_row_has_a_cell_for_each_peer() -> None:
    rows = [line for line in TEXT.splitlines() if re.match(r"\| [^|]+ \|", line)]
    wide = [line for line in rows if line.count("|") != rows[0].count("|")]
    matrix = [line for line in rows if line.count("|") == len(PEERS) + 2]
    assert len(matrix) + len(PEERS) == len(rows), wide


def test_counting(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text("#!/bin/sh\n\na = 1  # kept\n   # not\n  b\n", encoding="utf-8")
    assert counted(file) == ["a = 1  # kept", "  b"]
    assert changed(["a", "b", "c"], ["a", "x", "y", "c"]) == (2, 1)
    assert changed(["a", "b"], []) == (0, 2)


def test_an_agent_that_is_kept_has_no_other_beside_it() -> None:
    for peer in PEERS:
        found = lines_of(peer)
        assert ((found.added, found.removed) == (0, 0)) == peer.keeps_agent
        assert not (peer.keeps_agent and (CODE / peer.folder / "agent.py").exists())


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    with runner_proxy(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What scripts of a user import from beside them is forgotten again."""
    beside = ("agent", "warehouse", "train")
    for name in beside:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(CODE / "before"))
    yield monkeypatch
    for name in beside:
        sys.modules.pop(name, None)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_tasks_for_a_batch_of_each_peer(code: pytest.MonkeyPatch) -> None:
    """Some drop a batch that is not full, and would train nothing."""
    tasks = load(CODE / "before" / "warehouse.py").tasks()
    assert len({task["question"] for task in tasks}) == len(tasks) >= 16


def test_ours_runs(proxy: ProxyWithEngine, code: pytest.MonkeyPatch) -> None:
    """Two attempts at each task: the tool is called, then its number said."""
    code.setenv("OPENAI_BASE_URL", f"{proxy.url}/v1")
    code.setenv("OPENAI_API_KEY", "unused")
    train = load(CODE / "tracegrad" / "train.py")
    [task] = [each for each in train.tasks() if each["question"] == "How many lamps are in Rome?"]
    call = Answer("", tool_calls=[("stock", '{"item": "lamp", "city": "Rome"}')])
    proxy.engine.replies.extend([call, Answer("42"), call, Answer("17")])
    report = tracegrad.run(
        train.solve, train=[task], attempts=2, concurrency=1, said=lambda _: None
    )
    assert report.groups == 1
    rows = eventually(
        lambda: len(found := [row for row in proxy.store.rollouts() if row.outcome]) == 2 and found
    )
    assert {row.reward for row in rows} == {1.0, 0.0}
    assert all(row.turns == 2 for row in rows)


def test_trl_takes_it(code: pytest.MonkeyPatch) -> None:
    path = CODE / "trl" / "train.py"
    module = load(path)
    used = [each for each in uses_of(path.read_text(encoding="utf-8"), "trl", {}) if each.called]
    assert {each.path for each in used} == {"GRPOConfig", "GRPOTrainer"}
    for use in used:
        inspect.signature(getattr(module, use.path)).bind_partial(**dict.fromkeys(use.keywords))
    assert module.rewards([[{"content": "42"}]], ["42"], prompts=[]) == [1.0]


# --- the packages of peers, as they are in the registry ---


@pytest.mark.slow
@pytest.mark.parametrize("peer", OF_A_WHEEL, ids=lambda peer: peer.folder)
def test_names_and_parameters_are_the_packages(peer: Peer) -> None:
    assert peer.wheel is not None
    if peer.folder == "art" and sys.version_info < (3, 12):
        pytest.skip("its source is in Python 3.12's syntax")
    source = Source(wheel_source(peer.wheel, peer.version))
    package = {"agent_lightning": "agentlightning"}.get(peer.folder, peer.folder)
    used = [
        use
        for path in sorted((CODE / peer.folder).glob("*.py"))
        for use in uses_of(path.read_text(encoding="utf-8"), package, peer.objects)
    ]
    assert used
    assert [problem for use in used if (problem := source.problem(use))] == []


@pytest.mark.slow
@pytest.mark.parametrize("peer", OF_A_WHEEL, ids=lambda peer: peer.folder)
def test_files_that_are_named_are_in_the_wheel(peer: Peer) -> None:
    assert peer.wheel is not None
    [section] = re.findall(rf"^### {re.escape(peer.title)}\n(.+?)(?=^### |\Z)", TEXT, re.M | re.S)
    [(folder, said)] = re.findall(
        rf"^- Found in the wheel {peer.version}, `(\w+)/`: (.+?)(?=^- |\Z)", section, re.M | re.S
    )
    named = [name for name in re.findall(r"`([^`]+)`", said) if re.search(r"[/.]", name)]
    assert len(named) > 5
    root = wheel_source(peer.wheel, peer.version) / folder
    assert [name for name in named if not (root / name).exists()] == []


def missing(settings: Any, keys: list[str]) -> list[str]:
    """Of dotted keys, those that the settings do not have."""

    def has(key: str) -> bool:
        found = settings
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return False
            found = found[part]
        return True

    return [key for key in keys if not has(key)]


def dotted(tree: Any, above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "env_map":
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def keys_in(script: str) -> list[str]:
    return re.findall(r"(?:^|\s)([a-z_]+(?:\.[a-z_]+)*)=(?=\S)", script, re.M)


@pytest.mark.slow
def test_settings_are_the_packages() -> None:
    [verl] = [peer for peer in PEERS if peer.folder == "verl"]
    folder = wheel_source("verl", verl.version) / "verl" / "trainer" / "config"
    known = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8"))
    keys = keys_in((CODE / "verl" / "run.sh").read_text(encoding="utf-8"))
    assert len(keys) > 15
    assert missing(known, keys) == []

    [lightning] = [peer for peer in PEERS if peer.folder == "agent_lightning"]
    root = wheel_source("agentlightning", lightning.version) / "agentlightning"
    script = (CODE / "agent_lightning" / "run.sh").read_text(encoding="utf-8")
    for program in ("server", "controller"):
        [line] = re.findall(rf"^agl-{program} (.+) &$", script, re.M)
        own = yaml.safe_load((root / "config" / f"{program}.yaml").read_text(encoding="utf-8"))
        assert missing(own, keys_in(line)) == []
    code = (CODE / "agent_lightning" / "train.py").read_text(encoding="utf-8")
    [overrides] = re.findall(r"^OVERRIDES = (\{.*?^\})", code, re.M | re.S)
    own = yaml.safe_load((root / "verl" / "config.yaml").read_text(encoding="utf-8"))
    asked = list(dotted(eval(overrides)))  # a literal of ours
    assert missing(known, missing(own, asked)) == []


def test_a_name_or_parameter_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .a import f, C\n", encoding="utf-8")
    (tmp_path / "pkg" / "a.py").write_text(
        "class B:\n def go(self, x, *, y=1): ...\n"
        "class C(B):\n def __init__(self, z): ...\n"
        "def f(a, *, b=1, **kwargs: Never): ...\n"
        "def g(a): ...\n",
        encoding="utf-8",
    )
    code = "from pkg import f, C, gone\nf(1, b=2)\nf(1, c=2)\nc = C(3)\nc.go(1, y=2)\nc.go(1, 2)\n"
    source = Source(tmp_path)
    used = uses_of(code, "pkg", {"c": "pkg:C"})
    assert Use("pkg", "C.go", True, ("y",), 1) in used
    assert [problem for use in used if (problem := source.problem(use))] == [
        "pkg:gone is not there",
        "pkg:f has no parameters ['c']",
        "pkg:C.go takes 1 arguments by position, not 2",
    ]
