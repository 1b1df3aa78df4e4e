"""`trainer step` as a person meets it: its steps, its end, its refusals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from support.trainer import scorers
from support.trainer.prepared_run import SMALL, fill, save_smallest_model, settings_of, steps_of
from support.trainer.tiny_model import load_model
from tracegrad.events import Reward, RolloutFinished, RolloutStarted
from tracegrad.settings_sources import SettingsError
from tracegrad.store import Store, StoreTooNew
from tracegrad.store.checkpoint_manifest import MANIFEST_NAME
from tracegrad_trainer.cli.app import app
from tracegrad_trainer.config.loading import without_unused
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError, list_checkpoints
from tracegrad_trainer.rl.preflight import check_before_training, check_store_has_groups
from tracegrad_trainer.rl.rank_main import read_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest_model(tmp_path_factory.mktemp("smallest") / "model")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str


@pytest.fixture(scope="module", autouse=True)
def signals() -> Iterator[None]:
    """The commands set how signals are taken; here they run in our process."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def trainer(*words: object) -> Done:
    """A command in this process; the ranks are processes of their own."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.output
    return Done(found.exit_code, found.stdout)


def options(model: Path, state_dir: Path, **changes: object) -> list[str]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    sets = {"model": model, "state_dir": state_dir, **SMALL, **named}
    return [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder in which two ranks have made two steps of three."""
    state_dir = tmp_path_factory.mktemp("state")
    fill(f"sqlite:///{state_dir}/store.db", groups=8)
    done = trainer("step", *options(model, state_dir, ranks=2), "--steps", 2, "--json")
    assert done.returncode == 0, done.stdout
    (state_dir / "printed.json").write_text(done.stdout)
    return state_dir


def test_steps_are_taken_recorded_and_printed(run: Path) -> None:
    printed = [json.loads(line) for line in (run / "printed.json").read_text().splitlines()]
    steps = steps_of(f"sqlite:///{run}/store.db")
    assert [step.step for step in steps] == [step.version for step in steps] == [1, 2]
    assert [one["step"] for one in printed] == [1, 2]
    assert [one["metrics"] for one in printed] == [step.metrics for step in steps]
    for step in steps:
        assert step.batch is not None
        assert step.batch["ranks"] == 2
        assert Path(step.checkpoint or "").is_dir()
        assert {"wait", "train", "checkpoint"} <= set(step.metrics["seconds"])
    assert [step.batch["version"] for step in steps if step.batch] == [0, 1]
    assert not list((run / "checkpoints").glob(".*")), "no half of one"


def test_what_is_left_is_trained_and_then_there_is_nothing(
    run: Path, model: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)  # its checkpoints move with it
    rest = trainer("step", *options(model, again), "--steps", 9)
    assert rest.returncode == 0, rest.stdout
    assert rest.stdout.splitlines()[0] == "resumes from step 2, version 2"
    assert rest.stdout.splitlines()[1].startswith("step 3 → version 3")
    last = " ".join(rest.stdout.splitlines()[-1].split())
    assert last.startswith("1 step taken, now at step 3; nothing more to train: of ")
    assert "equal_reward" in last
    nothing = trainer("step", *options(model, again))
    assert nothing.returncode == 3
    assert "0 steps taken, now at step 3; nothing more to train" in nothing.stdout


def test_a_selection_that_fits_nothing_is_named_and_spends_nothing(
    model: Path, tmp_path: Path
) -> None:
    turns = fill(f"sqlite:///{tmp_path}/store.db", groups=2)
    done = trainer("step", *options(model, tmp_path, batches__models='["polcy"]'))
    assert done.returncode == 3
    said = " ".join(done.stdout.split())
    assert "batches.models = 'polcy' fits no turn; there are: 'policy'" in said
    assert f"0 trained, {len(turns)} waiting ({len(turns)} given back, since the sel" in said
    done = trainer("step", *options(model, tmp_path, batches__models='["policy", "coder"]'))
    assert done.returncode == 0
    assert "batches.models = 'coder' fits no turn" in done.stdout
    [step] = steps_of(f"sqlite:///{tmp_path}/store.db")
    assert step.metrics["turns_trained"] == len(turns)


def test_a_guard_that_ends_it_is_named_with_what_to_do(model: Path, tmp_path: Path) -> None:
    """Not "nothing more to train": the pause holds the next `trainer serve`, too."""
    url = f"sqlite:///{tmp_path}/store.db"
    fill(url, groups=8)
    watched = options(model, tmp_path, guards__action="pause", guards__min_entropy=1000)
    done = trainer("step", *watched, "--steps", 3)
    assert done.returncode == 0, done.stdout
    last = " ".join(done.stdout.splitlines()[-1].split())
    assert last.startswith("1 step taken, now at step 1; paused by guard:entropy: ")
    assert "until you let it go on (trainer resume --why TEXT)" in last
    resumed = trainer("resume", "--why", "as wished", "--wait", 0, "--state-dir", tmp_path)
    assert resumed.returncode == 0, "it can be done at once"
    with Store.open(url) as store:
        assert [one.kind for one in store.open_decisions()] == ["pause", "resume"]


def test_export_writes_what_transformers_loads(run: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    done = trainer(
        "export", *options(model, run), "--out", out, "--dtype", "float32", "--shard-size", "30KB"
    )
    assert done.returncode == 0, done.stdout
    assert f"the weights of step 2: {out}" in done.stdout
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert (out / "model.safetensors.index.json").exists()
    assert (out / "chat_template.jinja").read_text() == (model / "chat_template.jinja").read_text()
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(model))
    first, second = tmp_path / "first", load_model(out)
    named = trainer(
        "export", *options(model, run), "--out", first, "--step", 1, "--dtype", "float32"
    )
    assert named.returncode == 0, named.stdout
    weights = [dict(load_model(folder).named_parameters()) for folder in (model, first, out)]
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, weights[2][name])
    moved = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    further = [name for name in weights[0] if not torch.equal(weights[1][name], weights[2][name])]
    assert len(moved) > 10
    assert len(further) > 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", 7], "--step 7: no such checkpoint"),
        (["--dtype", "int8"], "--dtype int8: use one of float32, bfloat16, float16"),
        (["--merged"], "--merged: the model is trained without LoRA"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(
    words: list[object], said: str, run: Path, model: Path, tmp_path: Path
) -> None:
    done = trainer("export", *options(model, run), "--out", tmp_path / "out", *words)
    assert done.returncode == 1
    assert done.stdout.startswith(f"trainer export: {said}")
    assert not (tmp_path / "out").exists()


# What is wrong before anything starts


def checked(settings: TrainerSettings) -> None:
    settings.state_dir.mkdir(exist_ok=True)
    with Store.open(settings.proxy.store) as store:
        check_before_training(settings, store)
        check_store_has_groups(settings, store)


def test_a_run_that_is_in_order_is_let_through(run: Path, model: Path) -> None:
    checked(settings_of(model, run))


def test_a_missing_part_of_the_last_checkpoint_is_one_line_and_nothing_starts(
    run: Path, model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    part = list_checkpoints(broken / "checkpoints")[-1] / "__1_0.distcp"
    part.unlink()
    done = trainer("step", *options(model, broken))
    assert done.returncode == 1
    [line] = done.stdout.splitlines()
    assert line.startswith(f"trainer step: checkpoint part {part} is missing")
    assert "checkpoint.resume_from=1" in line
    assert not (broken / "logs" / "ranks.log").read_text().count("step 3")
    gone_on = trainer("step", *options(model, broken, checkpoint__resume_from=1))
    assert gone_on.returncode == 0, gone_on.stdout
    last = steps_of(f"sqlite:///{broken}/store.db")[-1]
    assert (last.step, last.version) == (3, 4), "version 2's number was the lost weights'"


def test_a_damaged_checkpoint_is_not_loaded(run: Path, model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "broken")
    shutil.copytree(run, settings.state_dir)
    part = list_checkpoints(settings.checkpoints)[-1] / ".metadata"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{part} has \d+ bytes, not"):
        checked(settings)


def test_adapters_added_to_a_run_of_full_weights_are_one_line(run: Path, model: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        checked(settings_of(model, run, fsdp__lora__rank=4))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("fsdp.lora: the checkpoints are of full weights, and no")
    assert "(step 2); set it back, or take a new state folder" in str(error.value)


def files_of(folder: Path) -> dict[str, bytes]:
    """Less the locks, which have the name of whoever held them last."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if "lock" not in path.name}


def test_another_model_is_refused_before_anything_starts(
    run: Path, model: Path, tmp_path: Path
) -> None:
    other = save_smallest_model(tmp_path / "other", seed=5)
    before = files_of(run / "run")
    assert {"settings.json", "ranks.json", "journal.jsonl"} <= before.keys()
    done = trainer("step", *options(other, run))
    assert done.returncode == 1
    assert files_of(run / "run") == before, "its model and its last run are what they were"
    [line] = done.stdout.splitlines()
    assert line.startswith(
        f"trainer step: model = {str(other)!r}: the checkpoints were trained from {str(model)!r}"
    )
    moved = Path(shutil.copytree(model, tmp_path / "moved"))
    checked(settings_of(moved, run))


def test_a_checkpoint_of_before_its_model_was_recorded_is_known_by_its_step(
    run: Path, model: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    for checkpoint in list_checkpoints(old / "checkpoints"):
        manifest = json.loads((checkpoint / MANIFEST_NAME).read_text())
        del manifest["base"]
        (checkpoint / MANIFEST_NAME).write_text(json.dumps(manifest))
    with sqlite3.connect(old / "store.db") as database:
        database.execute("UPDATE steps SET manifest_digest = NULL, parent_digest = NULL")
    checked(settings_of(model, old))
    with pytest.raises(CheckpointError, match=r"fsdp\.lora: the checkpoints are of full"):
        checked(settings_of(model, old, fsdp__lora__rank=4))
    other = save_smallest_model(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match="the checkpoints were trained from"):
        checked(settings_of(other, old))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {"vocab_size": 50}, r"its tokenizer has .* tokens, the model embeds 50"),
        ("tokenizer.json", None, "its tokenizer cannot be loaded"),
    ],
)
def test_a_tokenizer_that_is_not_the_models_or_none_is_refused(
    model: Path, tmp_path: Path, file: str, content: dict[str, int] | None, words: str
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    before = json.loads((other / file).read_text())
    (other / file).write_text("{}" if content is None else json.dumps(before | content))
    with pytest.raises(ValueError, match=words):
        checked(settings_of(other, tmp_path / "state"))


def test_a_model_that_does_not_fit_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracegrad_trainer.engine.model.memory.free_host_memory", lambda: 1 << 16)
    with pytest.raises(ValueError, match="does not fit"):
        checked(settings_of(model, tmp_path / "state"))


def test_rollouts_without_tasks_are_no_groups(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "state")
    settings.state_dir.mkdir()
    with Store.open(settings.proxy.store) as store:
        store.append(
            [
                RolloutStarted(rollout_id="alone"),
                Reward(rollout_id="alone", value=1.0),
                RolloutFinished(rollout_id="alone"),
            ]
        )
    with pytest.raises(ValueError, match="none of the 1 that wait in the store has a task"):
        checked(settings)


@pytest.mark.parametrize("preset", ["dpo", "kto", "sft"])
def test_objectives_of_stored_traces_have_a_program_of_their_own(
    preset: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"use trainer sft --preset {preset}"):
        checked(settings_of(model, tmp_path / "state", objective__preset=preset))


def test_a_store_of_a_later_version_is_refused(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path / "state")
    settings.state_dir.mkdir()
    Store.open(settings.proxy.store).close()
    with sqlite3.connect(settings.state_dir / "store.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreTooNew, match="upgrade tracegrad"):
        checked(settings)


def test_settings_without_vllm_are_enough(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "tracegrad.toml"
    file.write_text(f'model = "{model}"\nstate_dir = "{tmp_path}"\n[optim]\nlr = 1e-4\n')
    settings = read_settings(file)
    assert settings.optim.lr == 1e-4
    resolved = tmp_path / "settings.json"
    resolved.write_text(settings.model_dump_json())
    assert read_settings(resolved).stored() == settings.stored()


def test_a_wrong_file_of_settings_is_one_line(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"model": str(model), "ranks": 0}))
    with pytest.raises(SettingsError, match=r"^ranks: ") as error:
        read_settings(file)
    assert "\n" not in str(error.value)


def test_the_reference_is_the_model_unless_another_is_named(model: Path, tmp_path: Path) -> None:
    assert settings_of(model, tmp_path).reference_folder == model
    other = save_smallest_model(tmp_path / "other", seed=1)
    compared = settings_of(model, tmp_path, reference=other, objective__kl="k3")
    assert compared.reference_folder == other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective__preset": "ppo", "batches__stale": "weight"}, "objective 'ppo' does not read"),
        ({"objective__preset": "ppo", "data__refill": "true"}, "data.refill replaces groups of eq"),
        (
            {"data__in_flight": 5},
            "data.in_flight = 5: a batch is never whole with fewer rollouts than 6",
        ),
        (
            {"data__over_sample": 1, "data__in_flight": 7},
            "than 8 (batches.groups 2 x (group_size 3 + over_sample 1)); raise it",
        ),
        (
            {"data__over_sample": 1, "batches__group_size": 1, "objective__advantage": "running"},
            "data.over_sample: groups of one rollout are not cut",
        ),
        ({"data__over_sample_keep": "drawn"}, "over_sample_keep = 'drawn': there are no more"),
        (
            {"data__synchronous": "true", "batches__stale": "weight"},
            "data.synchronous: no turn lags, and batches.stale = 'weight'",
        ),
        ({"batches__stale": "wait"}, "stale = 'wait' waits by max_staleness, and that is none"),
        ({"batches__stale_decay": 0.5}, "stale_decay 0.5: it is of stale = 'weight'"),
        ({"objective__gae_lambda": 0.5}, "gae_lambda = 0.5: nothing in this objective uses it (it"),
        ({"batches__group_size": 1}, "'grpo' compares the rollouts of a group"),
        ({"reference": "MODEL"}, "reference: objective 'grpo' compares with none"),
        ({"reference": "/nowhere"}, "reference: /nowhere: there is no such folder"),
        (
            {"fsdp__attention": "flahs"},
            "fsdp.attention: Input should be 'auto', 'packed'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    changes = {name: model if value == "MODEL" else value for name, value in changes.items()}
    with pytest.raises(SettingsError, match=re.escape(words)) as error:
        settings_of(model, tmp_path, **changes)
    assert "\n" not in str(error.value)


def test_what_was_recorded_before_that_was_an_error_can_be_read(
    model: Path, tmp_path: Path
) -> None:
    stored = settings_of(model, tmp_path, objective__preset="ppo").stored()
    old = json.loads(json.dumps(stored))
    old["objective"] |= {"over_length_budget": 9, "over_length_part": 2, "mask_low": 0.1}
    old["batches"] |= {"stale": "weight", "stale_decay": 0.5}
    old["data"]["refill"] = True
    old["reference"] = str(model)
    with pytest.raises(ValueError, match="over_length_budget"):
        TrainerSettings.model_validate(old)
    read = TrainerSettings.model_validate(without_unused(old))
    assert read.objective == TrainerSettings.model_validate(stored).objective
    assert (read.batches.stale, read.data.refill, read.reference) == ("drop", None, None)


def test_rollouts_that_stand_alone_need_an_advantage_that_does_not_compare(
    model: Path, tmp_path: Path
) -> None:
    alone = settings_of(model, tmp_path, batches__group_size=1, objective__advantage="running")
    assert alone.batches.group_size == 1


def test_tables_that_were_left_out_can_be_set(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path, fsdp__lora__rank=4)
    assert settings.fsdp.lora is not None
    assert (settings.fsdp.lora.rank, settings.fsdp.lora.alpha) == (4, 32)


def test_a_part_of_ones_own_lies_where_the_command_is_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(tokens, log_ratio, settings):\n"
        "    loss = -tokens.advantage * tokens.policy_logprobs * settings.options['times']\n"
        "    return loss, tokens.demonstration\n"
    )
    fill(f"sqlite:///{tmp_path}/store.db", groups=2)
    own = {"objective.surrogate": "mine:loss", "objective.options": '{"times": 3}'}
    command = [Path(sys.executable).with_name("trainer"), "step", "--steps", "1"]
    done = subprocess.run(
        [*command, *options(model, tmp_path, **own)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [step] = steps_of(f"sqlite:///{tmp_path}/store.db")
    assert step.settings["objective"]["surrogate"] == "mine:loss"


def test_it_scores_before_it_looks_for_rewards(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents gave rewards too: what counts is the sum, and a scorer that failed is said."""
    url = f"sqlite:///{tmp_path}/store.db"
    fill(url, groups=2)
    with Store.open(url) as store:
        names = [each.rollout_id for each in store.rollouts()]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv(scorers.CALLS, str(tmp_path / "calls"))
    command = f'[ "$TRACEGRAD_ROLLOUT_ID" != {names[0]} ] || exit 9'
    wanted = {
        "rewards__functions": '["support.trainer.scorers:by_turns"]',
        "rewards__commands": json.dumps({"check": command}),
        "rewards__retries": 0,
    }
    given = options(model, tmp_path, **wanted)
    done = trainer("step", *given, "--dry-run")
    assert "nothing is scored here" in done.stdout
    done = trainer("step", *given)
    assert done.stdout.splitlines()[0] == "12 scorings, 1 failed; 5 rewards composed"
    with Store.open(url) as store:
        assert store.rollout(names[0]).summary.state == "scoring_failed"
        one = store.rollout(names[1])
        assert one.summary.reward == len(one.turns) + 1.0
    done = trainer("score", *given, names[0])
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        1,
        "1 scoring, 1 failed; 0 rewards composed",
    )
    status = json.loads(trainer("status", "--state-dir", tmp_path, "--json").stdout)
    assert status["scoring_failures"] == [
        {"scorer": "check", "error": "check ended with exit code 9", "rollouts": 1}
    ]
    assert status["scorings"]["by_turns"]["scored"] == 6
    shown = trainer("status", "--state-dir", tmp_path).stdout
    assert "1 rollout: check ended with exit code 9" in shown
    done = trainer("step", *given, "--dry-run")
    assert "check ended with exit code 9" in " ".join(done.stdout.split())
    again = {**wanted, "rewards__commands": json.dumps({"check": "true"})}
    done = trainer("score", *options(model, tmp_path, **again), names[0], "--json")
    assert json.loads(done.stdout) == {"scored": 1, "unknown": 0, "failed": 0, "composed": 1}
    nothing = trainer("score", *options(model, tmp_path, **again))
    assert (nothing.returncode, nothing.stdout) == (3, "0 scorings; 0 rewards composed\n")


def test_score_without_scorers_and_with_an_id_that_is_none(model: Path, tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    assert trainer("score", *options(model, tmp_path)).returncode == 2
    weights = options(model, tmp_path, rewards__weights='{"thumbs": 1}')
    done = trainer("score", *weights, "nobody")
    assert done.returncode == 2
