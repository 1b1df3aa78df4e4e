"""`tracegrad prune | redact | doctor`, as a person and as a cron job run them."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.store.conversations import request, response
from support.store.corruption import corrupt
from support.store.events import make_turn, rollout_events
from tracegrad.cli.app import app
from tracegrad.cli.commands import destructive
from tracegrad.events import Outcome
from tracegrad.store import Ledger, Store

SECRET = "tg-password-1234"
DAY = 86_400
DOCS = Path(__file__).parents[3] / "docs" / "care.md"


def run(url: str, *arguments: str, stdin: str | None = None) -> Result:
    environment = {"TRACEGRAD_STORE": url, "TERM": "dumb", "COLUMNS": "200"}
    return CliRunner().invoke(app, list(arguments), env=environment, input=stdin)


def printed_json(url: str, *arguments: str) -> Any:
    result = run(url, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def kept(url: str) -> str:
    """Two trained rollouts, one of them 40 days old; one that waits, as old."""
    now = time.time()
    with Store.open(url) as store:
        for name, age in (("old", 40), ("new", 1), ("waiting", 40)):
            at = now - age * DAY
            store.append(rollout_events(name, at=at, turns=0))
            turn = make_turn(f"{name}.0", name, request=request(SECRET), response=response("yes"),
                             created_at=at)  # fmt: skip
            store.append([turn])
        Ledger(store).commit_skipped({}, ["old", "new"])
    return url


def ids(url: str) -> set[str]:
    with Store.open(url) as store:
        return {row.rollout_id for row in store.rollouts()}


def requests(url: str) -> dict[str, Any]:
    with Store.open(url) as store:
        return {name: store.rollout_turns(name)[0].request for name in ids(url)}


def test_prune_says_what_would_go_and_does_nothing(kept: str) -> None:
    result = run(kept, "prune", "--older-than", "30d", "--dry-run")
    assert result.exit_code == 0
    assert "1 rollout may go: 1 turn" in result.stdout
    assert "1  skipped" in result.stdout
    assert "these stay: 1 waiting (--also-untrained)" in result.stdout
    assert printed_json(kept, "prune", "--older-than", "30d", "--dry-run")["kept_untrained"] == {
        "waiting": 1
    }
    assert ids(kept) == {"old", "new", "waiting"}


def test_prune_does_not_act_where_nobody_can_be_asked(kept: str) -> None:
    result = run(kept, "prune", "--older-than", "30d")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert ids(kept) == {"old", "new", "waiting"}


def test_prune_asks_on_a_terminal(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destructive, "is_interactive", lambda: True)
    result = run(kept, "prune", "--older-than", "30d", stdin="n\n")
    assert result.exit_code == 1
    assert "Remove 1 rollout for good?" in result.output
    assert len(ids(kept)) == 3
    assert run(kept, "prune", "--older-than", "30d", stdin="y\n").exit_code == 0
    assert ids(kept) == {"new", "waiting"}


def test_prune_removes_and_gives_room_back(kept: str) -> None:
    found = printed_json(kept, "prune", "--older-than", "30d", "--yes")
    assert found["removed"]["rollouts"] == 1
    assert found["files"].keys() == {"before", "after", "note"}
    assert ids(kept) == {"new", "waiting"}
    again = printed_json(kept, "prune", "--older-than", "30d", "--yes")
    assert (again["removed"]["rollouts"], again["files"]) == (0, None)
    also = printed_json(
        kept, "prune", "--older-than", "30d", "--also-untrained", "--yes", "--no-vacuum"
    )
    assert also["removed"]["pending"] == {"waiting": 1}
    assert also["files"] is None
    assert ids(kept) == {"new"}


def test_prune_wants_to_know_what(kept: str) -> None:
    sizes = ("much", "1,5GB", "1'000MB", "20-GB", "20 GB x", "100Mbit")
    for arguments, message in (
        ((), "say what may go"),
        *((("--max-size", size), "500MB") for size in sizes),
        (("--older-than", "soon"), "how long ago"),
        (("--text-only", "--max-size", "1GB"), "--max-size is about whole rollouts"),
        (("--text-only", "--also-untrained", "--task", "t"), "--also-untrained is about whole"),
        (("--outcome", "sad"), "--outcome"),
    ):
        result = run(kept, "prune", *arguments, "--yes")
        assert result.exit_code == 2
        assert message in result.stderr
    assert run(kept, "prune", "--rollout", "nobody", "--yes").exit_code == 1
    assert len(ids(kept)) == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500", 500),
        ("2kB", 2000),
        ("1.5 GB", 1_500_000_000),
        ("1GiB", 1 << 30),
        ("3T", 3 * 10**12),
        ("20Gi", 20 << 30),
    ],
)
def test_sizes_are_read_as_they_are_written(text: str, size: int) -> None:
    from tracegrad.cli.commands.prune import _parse_size

    assert _parse_size(text) == size


def test_prune_by_size_keeps_what_fits(kept: str) -> None:
    assert printed_json(kept, "prune", "--max-size", "1TB", "--yes")["removed"]["rollouts"] == 0
    assert printed_json(kept, "prune", "--max-size", "1", "--yes")["removed"]["rollouts"] == 2
    assert ids(kept) == {"waiting"}


def test_prune_text_only_leaves_what_is_trained_on(kept: str) -> None:
    would = printed_json(kept, "prune", "--text-only", "--older-than", "7d", "--dry-run")
    assert would["would_remove"]["turns"] == 2
    result = run(kept, "prune", "--text-only", "--older-than", "7d", "--yes")
    assert "dropped the text of 2 turns and 0 spans" in result.stdout
    texts = requests(kept)
    assert (texts["old"], texts["waiting"]) == (None, None)
    assert texts["new"] is not None


def test_redact_says_that_tokens_are_as_they_were(kept: str) -> None:
    result = run(kept, "redact", SECRET, "--yes")
    assert result.exit_code == 0, result.output
    assert "redacted 3 turns in 3 rollouts" in result.stdout
    assert "token ids are as they were" in result.stdout
    assert SECRET not in json.dumps(requests(kept))
    assert "redacted nothing in 0 rollouts" in run(kept, "redact", SECRET, "--yes").stdout


def test_redact_drops_tokens_where_it_is_asked_to(kept: str) -> None:
    result = run(kept, "redact", "--literal", SECRET, "--drop-tokens", "--rollout", "ol", "--yes")
    assert "1 turn lost the tokens and can never be trained" in result.stdout
    with Store.open(kept) as store:
        assert store.rollout_turns("old")[0].untrainable == "redacted"
        assert store.rollout_turns("new")[0].untrainable is None


def test_redact_leaves_nothing_in_a_files_free_pages(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    with Store.open(url) as store:
        store.append(rollout_events("r", outcome=Outcome.ABORTED, tags={"note": SECRET}))
    assert SECRET.encode() in path.read_bytes()
    assert printed_json(url, "redact", "--literal", SECRET, "--yes")["redacted"]["tasks"] == 1
    left = b"".join(file.read_bytes() for file in tmp_path.glob("store.db*"))
    assert SECRET.encode() not in left


def test_redact_takes_hooks_secrets_and_the_standard_input(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "care_hooks.py").write_text(
        "def shout(record):\n    record['response'] = {'choices': []}\n    return record\n"
        "def fails(record):\n    raise KeyError('x')\n"
    )
    monkeypatch.chdir(tmp_path)
    only = ("--rollout", "old", "--yes")
    assert (
        printed_json(kept, "redact", "--hook", "care_hooks:shout", *only)["redacted"]["turns"] == 1
    )
    assert printed_json(kept, "redact", "--secrets", *only)["redacted"]["turns"] == 0
    failed = run(kept, "redact", "--hook", "care_hooks:fails", *only)
    assert failed.exit_code == 1
    assert "care_hooks:fails failed on a turn (KeyError)" in failed.stderr
    missing = run(kept, "redact", "--hook", "care_hooks:nothing", *only)
    assert missing.exit_code == 2
    assert "--hook" in missing.stderr
    result = run(kept, "redact", "-", *only, stdin=f"{SECRET}\n")
    assert "redacted 1 turn in 1 rollout" in result.stdout


def test_redact_wants_to_know_what(kept: str) -> None:
    for arguments, message in (
        ((), "say what"),
        (("(",), "no regular expression"),
        (("x*",), "everywhere"),
        (("x", "--field", "tokens"), "--field"),
        (("x",), "--yes"),
    ):
        sure = () if message == "--yes" else ("--yes",)
        result = run(kept, "redact", *arguments, *sure)
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_a_regular_expression_is_not_applied_to_what_it_put_there(kept: str) -> None:
    assert printed_json(kept, "redact", "[a-z]{8}", "--yes")["redacted"]["turns"] == 3
    before = requests(kept)
    assert printed_json(kept, "redact", "[a-z]{8}", "--yes")["redacted"]["turns"] == 0
    assert requests(kept) == before


def test_doctor_ends_with_0_where_all_is_well_and_with_1_where_not(kept: str) -> None:
    result = run(kept, "doctor")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].endswith("3 turns of 3 rollouts read")
    corrupt(kept, "UPDATE turns SET prompt_tokens = 7 WHERE turn_id = 'new.0'")
    result = run(kept, "doctor")
    assert result.exit_code == 1
    assert "broken   lengths: turn new.0: 3 prompt tokens, and 7 are recorded" in result.stdout
    assert "prune --rollout new --also-untrained" in result.stdout
    assert run(kept, "doctor", "--until", "30d").exit_code == 0
    found = json.loads(run(kept, "doctor", "--json").stdout)
    assert (found["ok"], found["rollouts"], found["turns"]) == (False, 3, 3)
    [broken] = [f for f in found["findings"] if f["broken"]]
    assert (broken["check"], broken["subject"]) == ("lengths", "turn new.0")


def test_doctor_fixes(kept: str) -> None:
    corrupt(kept, "INSERT INTO turn_ledger VALUES ('x', NULL, 'late', 1, NULL)")
    assert run(kept, "doctor").exit_code == 1
    result = run(kept, "doctor", "--fix")
    assert result.exit_code == 0
    assert "fixed    orphans: 1 rows of the ledger whose turn is gone" in result.stdout
    assert run(kept, "doctor").exit_code == 0


def documented() -> list[str]:
    """The commands of docs/care.md, as they stand there."""
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", DOCS.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [found[0] for line in lines if (found := re.search("tracegrad (prune|redact).*", line))]


@pytest.mark.parametrize("line", documented())
def test_the_commands_of_the_documentation_work(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "rules.py").write_text("def clean(record):\n    return record\n")
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(line, comments=True)
    result = run(kept, *arguments, "--dry-run", stdin="a password\n")
    assert result.exit_code == 0, result.output
    assert len(ids(kept)) == 3


def test_a_store_of_a_later_version_is_not_touched(kept: str) -> None:
    corrupt(kept, "UPDATE alembic_version SET version_num = '9999'")
    try:
        for command in (("doctor",), ("prune", "--task", "t", "--yes")):
            result = run(kept, *command)
            assert result.exit_code == 2
            assert "upgrade tracegrad" in result.stderr
    finally:
        corrupt(kept, "UPDATE alembic_version SET version_num = '0003'")
