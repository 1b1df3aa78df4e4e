"""Metrics where people look at them: each sink is read back by its own reader."""

from __future__ import annotations

import importlib.util
import socket
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from support.proxy.servers import eventually
from support.system.log_lines import our_lines
from tracegrad.inspect.metric_points import MetricPoint, push_point, step_point
from tracegrad.store import PolicyVersion, StepRecord
from tracegrad_trainer.metrics import MetricSinks, MetricsSettings, WandbSettings
from tracegrad_trainer.metrics.prometheus import PrometheusSink

METRICS: dict[str, Any] = {
    "loss": -0.25,
    "reward_mean": 0.5,
    "k3_lag_1": 0.125,
    "seconds": {"wait": 3.0, "train": 1.0},
    "skipped_stale": 2.0,
    "skipped_equal_reward": 4.0,
    "note": "a word is no number",
}


def record(step: int, **changes: Any) -> StepRecord:
    metrics = METRICS | changes
    return StepRecord(step=step, version=step + 1, created_at=1000.0 + step, metrics=metrics)


def scraped(sinks: MetricSinks) -> dict[str, float]:
    [prometheus] = [sink for sink in sinks.sinks if isinstance(sink, PrometheusSink)]
    url = f"http://127.0.0.1:{prometheus.port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as response:
        text = response.read().decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_step_is_flat_numbers() -> None:
    assert step_point(record(3)) == MetricPoint(
        3,
        1003.0,
        {
            "policy_version": 4.0,
            "loss": -0.25,
            "reward_mean": 0.5,
            "k3_lag_1": 0.125,
            "seconds/wait": 3.0,
            "seconds/train": 1.0,
            "skipped_stale": 2.0,
            "skipped_equal_reward": 4.0,
        },
    )


def test_a_push_is_written_with_its_gap() -> None:
    seconds = {"write": 1.5, "pause": 0.5}
    detail = {"seconds": seconds, "paused_s": 0.5, "gap": {"tokens": 8, "mean": 0.1, "max": 0.2}}
    served = push_point(PolicyVersion(4, 3, "serving", 7.0, detail))
    assert served == MetricPoint(
        3,
        7.0,
        {
            "push/failed": 0,
            "push/seconds": 2.0,
            "push/seconds/write": 1.5,
            "push/seconds/pause": 0.5,
            "push/paused_s": 0.5,
            "push/gap_mean": 0.1,
            "push/gap_max": 0.2,
        },
    )
    failed = push_point(PolicyVersion(4, None, "failed", 7.0, {"error": "x", "gap": None}))
    assert failed == MetricPoint(0, 7.0, {"push/failed": 1, "push/seconds": 0})


def test_prometheus_is_scraped_over_http(tmp_path: Path) -> None:
    sinks = MetricSinks.open(MetricsSettings(prometheus_port=0), tmp_path)
    try:
        sinks.step(record(1))
        sinks.step(record(2, loss=0.75))
        sinks.pushed(PolicyVersion(3, 2, "serving", 7.0, {"gap": {"mean": 0.1, "max": 0.2}}))
        found = scraped(sinks)
    finally:
        sinks.close()
    prefix = "tracegrad_trainer_"
    assert found[f"{prefix}step"] == 2
    assert found[f"{prefix}policy_version"] == 3
    assert found[f"{prefix}loss"] == 0.75
    assert found[f"{prefix}k3_lag_1"] == 0.125
    assert found[f"{prefix}push_gap_max"] == 0.2
    assert found[f"{prefix}seconds_total[wait]"] == 6.0, "counted over the steps"
    assert found[f"{prefix}turns_not_trained_total[equal_reward]"] == 8.0
    assert not [name for name in found if name.startswith("python_")], "a registry of its own"


def test_how_training_stands_is_scraped(tmp_path: Path) -> None:
    sinks = MetricSinks.open(MetricsSettings(prometheus_port=0), tmp_path)
    try:
        sinks.report_hold(False, lambda: {("promote", "gate"): 7})
        assert scraped(sinks)["tracegrad_trainer_held"] == 0
        for times in (1, 1, 3):
            counts = {("promote", "gate"): 7, ("rollback", "guard"): times}
            sinks.report_hold(True, lambda counts=counts: counts)  # type: ignore[misc]
        found = scraped(sinks)
    finally:
        sinks.close()
    assert found["tracegrad_trainer_held"] == 1
    counted = {name: value for name, value in found.items() if "decisions_total" in name}
    assert sorted(counted.values()) == [3.0, 7.0], counted


def test_the_port_is_free_again_after_close(tmp_path: Path) -> None:
    first = MetricSinks.open(MetricsSettings(prometheus_port=0), tmp_path)
    [prometheus] = first.sinks
    assert isinstance(prometheus, PrometheusSink)
    port = prometheus.port
    with pytest.raises(ValueError, match=r"^metrics\.prometheus_port: .*in use"):
        MetricSinks.open(MetricsSettings(prometheus_port=port), tmp_path)
    first.close()
    MetricSinks.open(MetricsSettings(prometheus_port=port), tmp_path).close()


def test_prometheus_listens_on_loopback_unless_set_otherwise(tmp_path: Path) -> None:
    sinks = MetricSinks.open(MetricsSettings(prometheus_port=0), tmp_path)
    [prometheus] = sinks.sinks
    assert isinstance(prometheus, PrometheusSink)
    assert prometheus._server.server_address[0] == "127.0.0.1"
    sinks.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", prometheus.port)) != 0


def test_tensorboards_event_file_is_read_back(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = MetricSinks.open(MetricsSettings(tensorboard=Path("board")), tmp_path)
    for step in (1, 2):
        sinks.step(record(step, loss=step / 8))
    sinks.close()
    events = reading.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    scalars = [(event.step, event.value, event.wall_time) for event in events.Scalars("loss")]
    assert scalars == [(1, 0.125, 1001.0), (2, 0.25, 1002.0)]
    assert {"seconds/wait", "skipped_stale", "policy_version"} <= set(events.Tags()["scalars"])


def test_a_wandb_run_is_written_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    settings = MetricsSettings(wandb=WandbSettings(project="p", mode="offline"))
    for step in (1, 2):  # as by two processes, one after the other
        sinks = MetricSinks.open(settings, tmp_path)
        sinks.step(record(step, loss=step / 8))
        sinks.close()
        assert not sinks.failures
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [logged(run) for run in runs] == [{"step": 1, "loss": 0.125}, {"step": 2, "loss": 0.25}]
    assert len({next(run.glob("*.wandb")).name for run in runs}) == 1, "one run for them"


def logged(run: Path) -> dict[str, float]:
    """Step and loss of the only line in an offline run's file."""
    file = next(run.glob("*.wandb"))
    # W&B's own process writes, and may still do so when the run is finished here.
    eventually(lambda: "exit" in [kind for kind, _ in written(file)])
    [history] = [record.history for kind, record in written(file) if kind == "history"]
    line = {".".join(item.nested_key) or item.key: item.value_json for item in history.item}
    return {name: float(line[name]) for name in ("step", "loss")}


def written(file: Path) -> list[tuple[str, Any]]:
    wandb_internal_pb2: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append((record.WhichOneof("record_type"), record))
    return found


def log_records(file: bytes) -> Iterator[bytes]:
    """LevelDB's log behind a header of 7 bytes: what stands in it, whole."""
    at, block, data = 7, 32768, b""
    while at + 7 <= len(file):
        if block - at % block < 7:  # too little for a header: filled with zeros
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", file, at + 4)
        data += file[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(file):  # not written yet
            return
        if kind in (1, 4):  # whole, or the last piece
            yield data
            data = b""


class Broken:
    name = "broken"

    def write(self, point: MetricPoint) -> None:
        raise ConnectionError("no such host")

    def close(self) -> None:
        raise RuntimeError("not even that")


def test_a_sink_that_fails_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    prometheus = PrometheusSink("127.0.0.1", 0)
    sinks = MetricSinks([Broken(), prometheus])
    for step in (1, 2, 3):
        sinks.step(record(step))
    found = scraped(sinks)
    sinks.close()
    assert our_lines(caplog) == [
        "metrics to broken failed, training goes on: ConnectionError('no such host')"
    ]
    assert sinks.failures == {"broken": 4}
    assert found["tracegrad_trainer_step"] == 3, "the others go on"
    assert found["tracegrad_trainer_sink_failures_broken"] == 3


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_a_missing_extra_is_named(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = {"tensorboard": "board", "wandb": {"project": "p"}}[extra]
    with pytest.raises(ValidationError, match=rf"pip install 'tracegrad\[{extra}\]'"):
        MetricsSettings.model_validate({extra: wanted})
    assert MetricsSettings(prometheus_port=0).tensorboard is None


def test_a_folder_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^metrics\.tensorboard: .*file"):
        MetricSinks.open(MetricsSettings(tensorboard=Path("file/board")), tmp_path)


def test_nothing_is_opened_where_nothing_is_asked_for(tmp_path: Path) -> None:
    sinks = MetricSinks.open(MetricsSettings(), tmp_path)
    sinks.step(record(1))
    sinks.close()
    assert (sinks.sinks, list(tmp_path.iterdir())) == ([], [])
