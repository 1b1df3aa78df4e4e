"""Our files, read as slime reads them (`support.readers`), hold what the store holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.readers.slime_reader import load_rollouts, read_prompts, training_data
from support.transfer.template_store import STOCK, TOOLS, fill
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.transfer import jsonl, parquet
from tracegrad.transfer.export_rollouts import RolloutExport
from tracegrad.transfer.token_rows import token_rows
from tracegrad_integrations.exports import slime


@pytest.fixture
def scene(store: Store) -> Store:
    fill(store)
    return store


def turns(store: Store) -> dict[str, Turn]:
    return {t.turn_id: t for row in store.rollouts() for t in store.rollout_turns(row.rollout_id)}


def test_saved_rollouts_are_what_was_sampled(scene: Store, tmp_path: Path) -> None:
    export = RolloutExport(store=scene)
    path = tmp_path / "0.pt"
    with path.open("wb") as file:
        slime.save_samples(file, export.layout(slime.SAMPLES))
    samples = load_rollouts(path)
    data = training_data(samples)
    known = turns(scene)
    rows = {
        # The turns that a row owns, and those on its path.
        ("d1.0", "d1.01"): ["d1.0", "d1.01"],
        ("d1.002",): ["d1.0", "d1.002"],
        ("c1.0", "c1.01"): ["c1.0", "c1.01"],
        ("a1.0",): ["a1.0"],
        ("a2.0",): ["a2.0"],
        ("a3.0",): ["a3.0"],
        ("d2.0",): ["d2.0"],
    }
    assert len(samples) == len(rows)
    for index, (own, path_of) in enumerate(rows.items()):
        first, last = known[path_of[0]], known[path_of[-1]]
        assert data["tokens"][index] == [*last.prompt_token_ids, *last.completion_token_ids]
        length = data["response_lengths"][index]
        assert len(data["tokens"][index]) - length == len(first.prompt_token_ids)
        response = data["tokens"][index][-length:]
        masked = [
            (token, logprob)
            for token, logprob, one in zip(
                response, data["rollout_log_probs"][index], data["loss_masks"][index], strict=True
            )
            if one
        ]
        assert masked == [
            pair
            for name in own
            for pair in zip(
                known[name].completion_token_ids, known[name].completion_logprobs, strict=True
            )
        ]
        context = [
            logprob
            for logprob, one in zip(
                data["rollout_log_probs"][index], data["loss_masks"][index], strict=True
            )
            if not one
        ]
        assert set(context) <= {0.0}
    assert data["raw_reward"] == [0.25, 0.25, 1.0, 1.0, 0.0, 0.5, 1.0]
    assert data["truncated"] == [0, 0, 1, 0, 0, 0, 0]
    # A rollout's rows share its number, and its denominator.
    assert [s["rollout_id"] for s in samples] == [0, 0, 1, 2, 3, 4, 5]
    assert [s["group_index"] for s in samples] == [0, 0, 1, 2, 2, 2, 3]
    fork = sum(len(known[name].completion_token_ids) for name in ("d1.0", "d1.01", "d1.002"))
    assert data["rollout_mask_sums"][:2] == [fork, fork]
    assert samples[2]["weight_versions"] == ["4", "5"]
    assert samples[3]["label"] == "4"
    assert export.counts.left_out == {
        "turns: greedy": 1,
        "rollouts: infra_error": 1,
        "rollouts: no_reward": 1,
        "rollouts: open": 1,
    }


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_prompts(scene: Store, tmp_path: Path, ending: str) -> None:
    export = RolloutExport(store=scene)
    rows = export.layout(slime.PROMPTS)
    path = tmp_path / f"prompts.{ending}"
    with path.open("wb") as file:
        if ending == "parquet":
            parquet.write(file, rows, slime.PROMPTS.columns)
        else:
            file.writelines(map(jsonl.line_of, rows))
    samples = {sample["metadata"]["task_id"]: sample for sample in read_prompts(path)}
    assert samples.keys() == {"sum", "stock", "chat", None}
    assert samples["stock"]["prompt"] == STOCK
    assert samples["stock"]["metadata"]["tools"] == TOOLS
    assert samples["sum"]["metadata"]["tools"] == []
    assert samples["stock"]["label"] == "count lamps"
    assert samples["sum"]["label"] == "4"
    assert samples["sum"]["metadata"]["task"] == '{"text":"2+2?","answer":4}'
    assert samples["chat"]["label"] == ""


def test_a_row_whose_last_turn_is_left_out_ends_before_it(scene: Store) -> None:
    """And an earlier turn that is left out stays as context."""
    known = turns(scene)
    path = [known["c1.0"], known["c1.01"]]
    [row] = token_rows(path, {"c1.01"})
    assert row.token_ids == path[0].prompt_token_ids + path[0].completion_token_ids
    [row] = token_rows(path, {"c1.0"})
    assert row.token_ids == path[1].prompt_token_ids + path[1].completion_token_ids
    assert sum(row.mask) == len(path[1].completion_token_ids)
    assert row.prompt_tokens == len(path[0].prompt_token_ids)
    assert list(token_rows(path, {"c1.0", "c1.01"})) == []
