"""What is wrong before anything starts: one clear line, an exit code, nothing started."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from support.trainer.trainer_serve import Ended, find_free_port, trainer_serve
from tracegrad.store import PolicyVersion, Store
from tracegrad_trainer.cli.app import app
from tracegrad_trainer.launch.run_state import RunState, read_state
from tracegrad_trainer.launch.session import lock_state_folder


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """`trainer serve` sets how signals are taken; here it runs in our process."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def serve(model: Path, state_dir: Path, *sets: str) -> Ended:
    """`trainer serve` in this process; nothing of what is refused here takes another one."""
    ports = [f"proxy.port={find_free_port()}", f"vllm.port={find_free_port()}"]
    options = [option for each in [*ports, *sets] for option in ("--set", each)]
    children = psutil.Process().children(recursive=True)
    done = CliRunner().invoke(
        app, ["serve", "--model", str(model), "--state-dir", str(state_dir), *options]
    )
    assert done.exception is None or isinstance(done.exception, SystemExit)
    started = set(psutil.Process().children(recursive=True)) - set(children)
    return Ended(done.exit_code, done.output, [str(process) for process in started])


def one_line(ended: Ended, code: int, *words: str) -> None:
    ended.is_clean()
    assert ended.code == code
    assert len(ended.lines) == 1, ended.output
    assert ended.last_line.startswith("trainer serve: ")
    for word in words:
        assert word in ended.last_line


@pytest.mark.parametrize("which", ["proxy.port", "vllm.port"])
def test_a_port_in_use(which: str, char_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = serve(char_model, tmp_path / "state", f"{which}={port}")
    one_line(ended, 1, which, str(port), "in use")
    assert not (tmp_path / "state").exists()


def test_a_port_in_use_as_a_person_meets_it(char_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = {"model": char_model, "proxy.port": port}
        with trainer_serve(tmp_path / "state", settings) as run:
            one_line(run.ended(), 1, "proxy.port", str(port), "in use")
            assert len(run.family.members) == 1, "nothing was started"


def test_a_folder_in_use(char_model: Path, tmp_path: Path) -> None:
    state = RunState(tmp_path, "serve")
    state.update(stage="serving")
    with lock_state_folder(tmp_path):
        one_line(serve(char_model, tmp_path), 1, "state_dir", str(tmp_path), "in use")
    found = read_state(tmp_path, "serve")
    assert found is not None
    assert found["stage"] == "serving", "the other one's state is its own"


def test_a_store_of_another_model(char_model: Path, tmp_path: Path) -> None:
    """No step says so, but what was served does: its tokens would pass for this model's."""
    served = {"path": "/models/other", "weights": "0" * 64}
    (tmp_path / "state").mkdir()
    with Store.open(f"sqlite:///{tmp_path}/state/store.db") as store:
        store.record_version(PolicyVersion(0, None, "serving", detail={"base": served}))
        # A rollback says nothing of the model.
        store.record_version(PolicyVersion(0, None, "serving", detail={"weights_step": 0}))
    ended = serve(char_model, tmp_path / "state")
    ended.is_clean()
    assert ended.code == 1
    assert len(ended.lines) == 2, "the plan, and why not"
    assert ended.last_line.startswith("trainer serve: model = ")
    assert "'/models/other', with other weights" in ended.last_line


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("optim.lr=-1", ["optim.lr", "greater than or equal to 0"]),
        ("optim.lrr=1", ["optim.lrr", "did you mean optim.lr?"]),
        ("ranks=two", ["ranks", "valid integer"]),
        ("proxy.host=0.0.0.0", ["proxy.host", "not a loopback address"]),
        ("vllm.host=0.0.0.0", ["vllm.host", "not a loopback address"]),
        ("proxy.port=0", ["proxy.port"]),
        ("objective.preset=best", ["objective", "unknown preset 'best'"]),
        ("batches.max_row_tokens=99999", ["batches", "tokens_per_micro_batch"]),
        ("model=/nowhere", ["model", "/nowhere: there is no such folder"]),
        ("proxy", ["write it as table.name=value"]),
    ],
)
def test_a_wrong_setting(wrong: str, words: list[str], char_model: Path, tmp_path: Path) -> None:
    one_line(serve(char_model, tmp_path / "state", wrong), 2, *words)
    assert not (tmp_path / "state").exists()


def test_one_port_for_two(char_model: Path, tmp_path: Path) -> None:
    port = find_free_port()
    ended = serve(char_model, tmp_path, f"proxy.port={port}", f"vllm.port={port}")
    one_line(ended, 2, "proxy.port and vllm.port are both", str(port))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("state_dir=/proc/nothing", ["/proc/nothing"]),
        ("proxy.store=sqlite:////proc/nothing/store.db", ["/proc/nothing"]),
        ("proxy.store=mysql://root@localhost/x", ["proxy.store", "sqlite:///PATH"]),
    ],
)
def test_a_place_that_cannot_be_used(
    setting: str, words: list[str], char_model: Path, tmp_path: Path
) -> None:
    one_line(serve(char_model, tmp_path / "state", setting), 1, *words)


def test_a_settings_file_that_is_not_there(char_model: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "none.toml")])
    one_line(Ended(done.exit_code, done.output, []), 2, "none.toml: there is no such settings file")
