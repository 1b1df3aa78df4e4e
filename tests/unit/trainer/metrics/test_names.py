"""The table of metrics says what steps really record, and docs/metrics.md says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.trainer.step_samples import fill, train, trainer_settings
from tracegrad.inspect.metric_points import current_names, step_point
from tracegrad.inspect.step_metrics import SECTIONS
from tracegrad.store import StepHistory, Store
from tracegrad_trainer.cli.status import collect_status
from tracegrad_trainer.engine.distributed import take_peak_memory
from tracegrad_trainer.engine.peak_flops import throughput_metrics
from tracegrad_trainer.metrics import METRICS, find_metric

DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"

# What only some objectives, models and machines have, or pushes, which are no part of a step.
SOMETIMES = {
    *("kl_reference", "kl_reference_k1", "chosen_gain", "rejected_gain", "pair_accuracy"),
    *(
        "explained_variance",
        "entropy_coef",
        "value_lr",
        "updates_value_only",
        "mfu",
        "memory_peak",
        "expert_routing_known_share",
    ),
    *("intake_places", "intake_waited_s"),  # of `trainer serve`
    *("scored_…", "score_unknown_…", "score_failed_…", "score_seconds_…"),
    *("push/bytes", "push/gap_mean", "push/gap_p50", "push/gap_p99", "push/gap_max"),
    *("push/failed", "push/seconds", "push/seconds/…", "push/paused_s", "push/held_s"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of a step of two groups, one of which has equal rewards; flat."""
    settings = trainer_settings(tmp_path_factory.mktemp("run"))
    with Store.open(settings.proxy.store) as store:
        fill(store, 1)
        fill(store, 1, size=4, first=1)  # two groups: rewards 1 0, and 0 0
        settings = settings.model_copy(
            update={"batches": settings.batches.model_copy(update={"groups": 3})}
        )
        train(settings, 1)
        found = collect_status(store, settings.state_dir)
        assert found.not_trained == {"equal_reward": 6}
        [step] = StepHistory(store).steps()
    return step_point(step).values


def test_every_recorded_number_is_in_the_table(recorded: dict[str, float]) -> None:
    assert [name for name in recorded if find_metric(name) is None] == []


def test_every_metric_of_the_table_is_recorded(recorded: dict[str, float]) -> None:
    seen = {
        known
        for known in METRICS
        if any(
            name.startswith(known[:-1]) if known.endswith("…") else name == known
            for name in recorded
        )
    }
    assert set(METRICS) - seen - SOMETIMES == set()
    assert set(METRICS) >= SOMETIMES


def test_what_is_recorded_adds_up(recorded: dict[str, float]) -> None:
    assert recorded["turns"] == recorded["turns_trained"] + recorded["turns_skipped"] == 18
    reasons = {name: n for name, n in recorded.items() if name.startswith("skipped_")}
    assert reasons == {"skipped_equal_reward": 6}
    assert recorded["group_spread"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert recorded["tokens_per_second"] > 0
    assert recorded["seconds/train"] > 0
    assert 0 < recorded["ess"] <= 1
    assert recorded["k3"] >= 0


def test_the_page_has_the_table() -> None:
    wanted = []
    for title, section in SECTIONS.items():
        wanted += [f"### {title}", "", "| metric | unit | |", "|---|---|---|"]
        for name, one in section.items():
            what = one.what.replace("|", "\\|")
            wanted.append(f"| `{name}` | {one.unit} | {what} |")
        wanted.append("")
    assert "\n".join(wanted) in DOCS.read_text(encoding="utf-8")


def test_a_name_of_a_family_has_its_unit() -> None:
    found = [
        find_metric(name) for name in ("skipped_stale", "k3_lag_2", "seconds/push", "nonsense")
    ]
    assert [one and one.unit for one in found] == ["turns", "nats", "s", None]
    assert [one.clock for one in found if one] == [False, False, True]


def test_speed_is_tokens_over_time_and_mfu_flops_over_the_peak() -> None:
    assert throughput_metrics(300.0, 1.5) == {"tokens_per_second": 200.0}
    assert throughput_metrics(300.0, 1.5, flops=6e9, peak=None) == {"tokens_per_second": 200.0}
    found = throughput_metrics(300.0, 1.5, flops=6e9, peak=2 * 5e9)
    assert found == {"tokens_per_second": 200.0, "mfu": pytest.approx(0.4)}
    assert throughput_metrics(300.0, 0.0) == {}


def test_recorded_metrics_are_read_under_todays_names() -> None:
    old = {"k3_gap_4": 0.5, "gap_mean": 0.1, "expert_tokens": 3.0, "routes_known_share": 0.5}
    new = {
        "k3_lag_4": 0.5,
        "gap_mean": 0.1,
        "demonstration_tokens": 3.0,
        "expert_routing_known_share": 0.5,
    }
    assert current_names(old) == current_names(new) == new


def test_the_peak_of_memory_is_taken_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [7 << 30]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peaks[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peaks.append(0))
    assert take_peak_memory(torch.device("cpu")) is None
    assert take_peak_memory(torch.device("cuda", 0)) == 7 << 30
    assert take_peak_memory(torch.device("cuda", 0)) == 0
