"""The main job on the real parts: agents work, `trainer serve` learns from it, stops, resumes.

One run of two starts is shared by all tests here; each of them checks one thing that it left.
"""

from __future__ import annotations

import math
import re
import signal
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.agents.toy_agents import MAX_TOKENS, SPLIT, TOOL
from support.trainer.char_model import save_char_model
from support.trainer.main_job import PROMPT, Job, first_start, second_start
from support.trainer.tiny_model import load_model, reference_logprobs
from support.trainer.trainer_serve import cli, cli_json, trainer_serve
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.turn_tree import extends
from tracegrad_trainer.inference.logprob_probe import compare_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
GAP = 1e-4  # nats; the two engines agree to about 1e-6


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("job")
    job = Job(model=save_char_model(folder / "model"), state_dir=folder / "state")
    with pytest.MonkeyPatch.context() as patch:
        with trainer_serve(job.state_dir, {"model": job.model}) as run:
            patch.setenv("TRACEGRAD_URL", run.url)
            run.wait_serving()
            first_start(job, run)
            run.signal(signal.SIGTERM)
            job.ended.append(run.ended())
        with trainer_serve(job.state_dir, {"model": job.model}) as run:
            patch.setenv("TRACEGRAD_URL", run.url)
            second_start(job, run)
            run.signal(signal.SIGTERM)
            job.ended.append(run.ended())
        yield job


# What was captured


def test_every_completed_call_is_a_turn_with_what_its_client_saw(job: Job) -> None:
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    details = job.details()
    assert Counter(seen.kind for seen in job.seen) == {
        "traced": 16, "streamed": 8, "by_path": 16, "by_key": 16,
    }  # fmt: skip
    for seen in job.seen:
        [turn] = [
            turn
            for turn in details[seen.rollout_id].turns
            if (turn.response or {}).get("id") == seen.said.completion_id
        ]
        tools = [TOOL] if seen.kind == "traced" else None
        rendered = tokenizer.apply_chat_template(
            seen.messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        parents = [t for t in details[seen.rollout_id].turns if t.turn_id == turn.parent_id]
        assert_rendered(turn, parents, rendered, tokenizer)
        # With tools vLLM leaves special tokens in the text, all but the one that ends it.
        said = tokenizer.decode(turn.completion_token_ids, skip_special_tokens=tools is None)
        untold = said.removesuffix(tokenizer.eos_token).removeprefix(seen.said.text)
        # vLLM's parser keeps what may begin a call from a stream, also where the reply ends.
        assert untold == "" or (tools is not None and "<tool_call>".startswith(untold))
        assert turn.finish_reason == seen.said.finish_reason
        cut = seen.said.finish_reason == "length"
        assert (len(turn.completion_token_ids) == MAX_TOKENS) or not cut


def assert_rendered(
    turn: Turn, parents: Sequence[Turn], rendered: list[int], tokenizer: Any
) -> None:
    """The prompt is what the template makes of the messages, but for tokens in earlier replies
    that vLLM kept from the client (special ones): the engine gets them back."""
    prompt = turn.prompt_token_ids.tolist()
    if not parents:
        assert prompt == rendered
        return
    [parent] = parents
    assert extends(turn.prompt_token_ids, parent)
    known = len(parent.prompt_token_ids) + len(parent.completion_token_ids)
    assert prompt[known:] == rendered[-len(prompt[known:]) :]
    assert tokenizer.decode(prompt, skip_special_tokens=True) == tokenizer.decode(
        rendered, skip_special_tokens=True
    )


def test_turns_carry_all_that_training_needs(job: Job) -> None:
    turns = [turn for detail in job.details().values() for turn in detail.turns]
    assert len(turns) >= 60
    for turn in turns:
        tokens = len(turn.completion_token_ids)
        assert tokens > 0
        assert len(turn.completion_logprobs) == tokens
        assert all(math.isfinite(value) and value <= 0 for value in turn.completion_logprobs)
        assert sum(count for _, count in turn.policy_versions) == tokens
        assert {version for version, _ in turn.policy_versions} <= set(range(5))
        assert turn.sampling["top_p"] == 1
        greedy = turn.sampling["temperature"] == 0
        assert turn.untrainable == ("greedy" if greedy else None)
    assert sum(turn.untrainable == "greedy" for turn in turns) == 2


def test_recorded_logprobs_are_those_of_the_weights_that_the_version_names(job: Job) -> None:
    model = load_model(job.model)
    first = [
        turn
        for detail in job.details().values()
        for turn in detail.turns
        if {version for version, _ in turn.policy_versions} == {0} and turn.untrainable is None
    ]
    assert len(first) >= 10
    for turn in first:
        expected = reference_logprobs(model, turn.prompt_token_ids, turn.completion_token_ids)
        compare_logprobs(list(turn.completion_logprobs), expected, GAP)


def test_a_turn_is_the_child_of_the_one_whose_tokens_its_prompt_extends(job: Job) -> None:
    continued = forked = 0
    for detail in job.details().values():
        for i, turn in enumerate(detail.turns):
            fitting = [e for e in detail.turns[:i] if extends(turn.prompt_token_ids, e)]
            assert turn.parent_id == (fitting[-1].turn_id if fitting else None)
            assert (turn.fork_reason is None) == (bool(fitting) or i == 0)
            continued += bool(fitting)
            forked += i > 0 and not fitting
    # A special token that is sampled within the text is not in it: then the prompt goes on anew.
    assert continued >= 8
    assert continued + forked == 24


def test_spans_lie_under_their_rollouts_and_turns_under_their_spans(job: Job) -> None:
    details = job.details()
    traced = {seen.rollout_id for seen in job.seen if seen.kind == "traced"}
    for rollout_id in traced:
        spans = {span.span_id: span for span in details[rollout_id].spans}
        [root] = [span for span in spans.values() if span.parent_span_id is None]
        below = [span for span in spans.values() if span.parent_span_id == root.span_id]
        assert [span.name for span in below] == ["look_up", "look_up"]
        assert len(spans) == 3
        assert {turn.parent_span_id for turn in details[rollout_id].turns} == {root.span_id}
    for seen in job.seen:
        names = [span.name for span in details[seen.rollout_id].spans]
        count = {"traced": 3, "streamed": 1, "by_path": 0, "by_key": 0}[seen.kind]
        assert len(names) == count


# What was trained


def test_each_step_trained_exactly_the_turns_that_the_ledger_gives_it(job: Job) -> None:
    steps = job.steps()
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.version for step in steps] == [1, 2, 3, 4]
    trained: dict[int, list[Turn]] = defaultdict(list)
    consumed: dict[int, list[str]] = defaultdict(list)
    for rollout_id, detail in job.details().items():
        if detail.summary.consumed_step is not None:
            consumed[detail.summary.consumed_step].append(rollout_id)
        for turn in detail.turns:
            fate = detail.dispositions.get(turn.turn_id)
            if fate is not None and fate.step is not None:
                assert fate.step == detail.summary.consumed_step
                trained[fate.step].append(turn)
    for step in steps:
        batches = step.settings["batches"]
        assert len(consumed[step.step]) == batches["groups"] * batches["group_size"] == 8
        assert len(trained[step.step]) == step.metrics["turns_trained"]
        tokens = sum(len(turn.completion_token_ids) for turn in trained[step.step])
        assert tokens == step.metrics["tokens_trained"]
        assert all(turn.untrainable is None for turn in trained[step.step])
        assert step.checkpoint is not None
    # Two groups of 2 + 1 + 2 + 2 turns each; the first batch had two greedy turns.
    assert [len(trained[step.step]) for step in steps] == [12, 14, 14, 14]


def test_every_turn_is_trained_skipped_or_pending_for_a_reason(job: Job) -> None:
    details = job.details()
    with Store.open(job.store_url, create=False) as store:
        counts = store.turn_counts(SPLIT)
    captured = sum(len(detail.turns) for detail in details.values())
    assert counts.captured == captured == len(job.seen) + 4
    assert counts.trained == 54
    assert counts.skipped == {"greedy": 2, "env_error": 1}
    # The exam's, and the eager call's: its rollout was never given a tag.
    assert counts.pending == {"not_selected": 2, "open": 1}
    assert counts.captured == counts.trained + sum(counts.skipped.values()) + sum(
        counts.pending.values()
    )


def test_the_two_engines_agree_on_what_is_on_policy(job: Job) -> None:
    steps = job.steps()
    assert "precision: trains in float32" in job.ended[0].output
    assert all(step.metrics["gap_max"] < GAP for step in steps)
    assert all(step.metrics["gap_p50"] < step.metrics["gap_p50_bound"] for step in steps)
    assert all(step.metrics["mismatch"] == 0 for step in steps)
    # The batches that were sampled while the trainer was idle are on policy as a whole.
    for step in (steps[0], steps[2], steps[3]):
        assert step.metrics["gap_tokens"] == step.metrics["tokens_trained"] > 0


def test_every_version_is_served_and_proven(job: Job) -> None:
    with Store.open(job.store_url, create=False) as store:
        versions = store.versions()
    assert [version.version for version in versions] == [0, 1, 2, 3, 4]
    assert [version.step for version in versions] == [None, 1, 2, 3, 4]
    for version in versions:
        assert version.state == "serving"
        assert version.detail["gap"]["tokens"] > 0
        assert version.detail["gap"]["max"] < GAP


def test_training_changed_what_is_served(job: Job) -> None:
    untrained = reference_logprobs(load_model(job.model), PROMPT, job.during["sample"])
    assert max(abs(a - b) for a, b in zip(job.served, untrained, strict=True)) > 100 * GAP


# What people see


def test_status_tells_what_goes_on_while_it_runs(job: Job) -> None:
    status = job.during["status"]
    assert status["stage"] == "serving"
    assert status["doing"] == "waiting"
    assert status["version"] == 3
    assert status["steps_total"] == 3
    assert [step["step"] for step in status["steps"]] == [3, 2, 1]
    assert status["turns_captured"] == 42 + 3
    assert status["turns_trained"] == 40
    assert status["not_trained"] == {"greedy": 2, "env_error": 1, "not_selected": 1, "open": 1}
    assert set(status["processes"]) == {"serve", "ranks"}
    assert set(status["success"]) == {"train", "test"}
    assert 0 < status["success"]["train"]["mean"] < 1
    assert {"wait", "train", "checkpoint", "commit", "push"} <= set(status["seconds"])
    text = job.during["text"]
    assert text.startswith("serving at http://127.0.0.1:")
    for words in ("turns captured", "turns not trained", "greedy", "env_error", "not_selected"):
        assert words in text


def test_status_tells_what_happened_when_it_is_over(job: Job) -> None:
    place = ["--state-dir", str(job.state_dir)]
    status = cli_json("trainer", "status", *place, "--json")
    assert status["stage"] == "stopped"
    assert status["processes"] == {}
    assert status["version"] == 4
    assert status["turns_trained"] == 54
    assert "not running" in cli("trainer", "status", *place)


def test_rollouts_are_listed_and_told_while_it_runs_and_after(job: Job) -> None:
    listed = job.during["ls"]
    assert len(listed) == 3 * 8 + 3
    states = Counter(row["state"] for row in listed)
    assert states == {"consumed": 25, "waiting": 1, "open": 1}
    seen = job.seen[0]
    assert seen.rollout_id in job.during["show"]
    assert "trained in step 1" in job.during["show"] or "greedy" in job.during["show"]

    store = ["--store", job.store_url]
    after = cli_json("tracegrad", "rollouts", "ls", *store, "--json", "--limit", "100")
    assert len(after) == 4 * 8 + 4
    whole = cli_json("tracegrad", "rollouts", "show", seen.rollout_id, *store, "--json", "--tokens")
    assert whole["task_id"] == "task 1a"
    assert seen.said.completion_id in {turn["response"]["id"] for turn in whole["turns"]}
    assert all(turn["completion_token_ids"] for turn in whole["turns"])


# Stopping and going on


def test_it_stops_cleanly_when_it_is_told_to(job: Job) -> None:
    for ended in job.ended:
        ended.is_clean()
        assert ended.code == 0
        assert re.fullmatch(
            r"stopped by (Ctrl-C|SIGTERM); everything captured is in the store", ended.last_line
        )
    steps = [line for line in job.ended[0].lines if line.startswith("step ")]
    assert [line[:18] for line in steps] == [f"step {n} → version {n}" for n in (1, 2, 3)]


def test_the_second_start_goes_on_where_the_first_one_ended(job: Job) -> None:
    assert job.version_stopped == job.version_resumed == 3
    compare_logprobs(job.served_again, job.served, GAP)


def test_no_call_of_a_second_start_is_answered_by_the_first_weights(job: Job) -> None:
    assert job.early_rollout, "the eager agent got an answer"
    with Store.open(job.store_url, create=False) as store:
        [turn] = store.rollout_turns(job.early_rollout)
    assert turn.policy_versions == ((3, len(turn.completion_token_ids)),)
    untrained = reference_logprobs(
        load_model(job.model), turn.prompt_token_ids, turn.completion_token_ids
    )
    differences = [abs(a - b) for a, b in zip(turn.completion_logprobs, untrained, strict=True)]
    assert max(differences) > 100 * GAP


# Who reaches it


def test_nobody_without_its_key_says_what_is_served(job: Job) -> None:
    assert job.during["mark"] == 401
    assert 77 not in {version for seen in job.details().values() for turn in seen.turns
                      for version, _ in turn.policy_versions}  # fmt: skip


def test_the_key_of_pushes_is_told_to_whom_it_concerns(job: Job) -> None:
    holders = {
        name: environment.get("TRACEGRAD_PROXY_CONTROL_KEY")
        for name, environment in job.during["environments"].items()
    }
    key = holders["proxy"]
    assert holders == {"vllm": None, "proxy": key, "ranks": key}
    assert len(key) == 64
    told = [*job.during["command_lines"], *(ended.output for ended in job.ended)]
    told += [file.read_text() for file in (job.state_dir / "logs").iterdir()]
    told += [file.read_text() for file in (job.state_dir / "run").glob("*.json")]
    assert [text for text in told if key in text] == []


def test_what_it_wrote_is_its_owners_alone(job: Job) -> None:
    modes = {
        path.relative_to(job.state_dir): oct(stat.S_IMODE(path.stat().st_mode))
        for path in [job.state_dir, *job.state_dir.rglob("*")]
    }
    assert {mode for path, mode in modes.items() if (job.state_dir / path).is_dir()} == {"0o700"}
    assert {m: str(p) for p, m in modes.items() if (job.state_dir / p).is_file()}.keys() == {
        "0o600"
    }
    assert any(path.suffix == ".distcp" for path in modes)
