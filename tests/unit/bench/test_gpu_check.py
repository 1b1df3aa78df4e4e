"""The checks of a GPU, as far as each can be run without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.gpu_check import __main__ as program
from bench.gpu_check import (
    checkpoints,
    collectives,
    kernels,
    memory,
    models,
    parity,
    profile,
    pushes,
    resume,
    serving,
    sharing,
    speed,
)
from bench.gpu_check.check import Check, Finding, Machine
from bench.pages import ROOT, our_path
from torch.autograd import DeviceType  # type: ignore[attr-defined]

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    torch.set_num_threads(1)
    return Machine(CPU, True, tmp_path)


def test_without_a_gpu_it_says_so_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([]) == 2
    said = capsys.readouterr()
    assert said.err == "gpu-check: there is no CUDA device here\n"
    assert said.out == ""


def test_kernels_are_reported(machine: Machine) -> None:
    found = kernels.check(machine)
    forms = ("", ", window", ", soft cap", ", sinks, window")
    assert [row[0] for row in found.rows] == [f"{k}{f}" for k in ("packed", "tree") for f in forms]
    # Rounded as bfloat16 is, not exact by comparing something with itself.
    assert all(1e-4 < float(row[1]) < 3e-2 for row in found.rows)
    assert found.verdict == "right"


def test_a_kernel_that_is_off_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.BOUND, torch.bfloat16, 1e-6)
    found = kernels.check(machine)
    assert found.verdict == "wrong"
    assert "wrong: packed; packed, window" in found.said


def test_what_a_kernel_fails_of_is_its_row(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = kernels._compare

    def broken(name: str, *others: Any) -> kernels.Kernel:
        if name == "tree, soft cap":
            raise RuntimeError("no kernel")
        return compare(name, *others)

    monkeypatch.setattr(kernels, "_compare", broken)
    found = kernels.check(machine)
    assert found.verdict == "wrong"
    assert found.said == "8 forms of attention, wrong: tree, soft cap"
    assert found.rows[6] == ["tree, soft cap", "RuntimeError: no kernel", ""]


def test_in_float32_the_kernels_are_exact() -> None:
    for one in kernels.kernels(CPU, torch.float32):
        assert max(one.output, one.gradients) < 1e-5, one


def test_loops_are_reported(machine: Machine) -> None:
    found = speed.check(machine)
    assert not dist.is_initialized()
    names = [f"{way}, tiny, {kept}" for kept in ("all activations kept", "blocks recomputed")
             for way in ("tracegrad", "plain loop")]  # fmt: skip
    assert [row[0] for row in found.rows] == names
    assert all(float(row[1].replace(",", "")) > 0 for row in found.rows)
    assert {row[3] for row in found.rows} == {"–"}, "a CPU's peak is not known"


def test_what_does_not_fit_is_a_row(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(speed, "_ours", full)
    found = speed.check(machine)
    assert [row[1] for row in found.rows][::2] == ["does not fit"] * 2
    assert found.verdict == "wrong"

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(speed, "_ours", broken)
    found = speed.check(machine)
    assert [row[1] for row in found.rows][::2] == ["RuntimeError: no kernel"] * 2
    assert all(row[2] == "" and row[1] for row in found.rows[::2])
    assert found.verdict == "wrong"


def test_each_size_has_its_goal() -> None:
    """And each of our ways must run: one that does not would be missed by nobody."""

    def run(way: str, size: str, speed_: float, mfu: float, how: str = "kept") -> speed.Run:
        return speed.Run(way, size, how, tokens_per_s=speed_, mfu=mfu)

    loops = [run(speed.LOOP, size, 10, 0.1) for size in ("small", "large")]
    small, large = run(speed.OURS, "small", 12, 0.3), run(speed.OURS, "large", 11, 0.5)
    found = speed.judge_speed([small, large, *loops], goals=True)
    assert found.verdict == "wrong"
    assert found.said == (
        "MFU of small 30.0% (kept; goal 40%), MFU of large 50.0% (kept; goal 40%),"
        " 1.10 times the plain loop at least"
    )
    compiled = run(speed.OURS, "small", 15, 0.42, "compiled")
    found = speed.judge_speed([small, large, *loops, compiled], goals=True)
    assert (found.verdict, found.said[:30]) == ("right", "MFU of small 42.0% (compiled; ")
    full = speed.Run(speed.OURS, "large", "compiled", error="does not fit")
    found = speed.judge_speed([small, large, *loops, compiled, full], goals=True)
    assert found.verdict == "wrong"
    assert found.said.endswith("at least, failed: tracegrad, large, compiled")
    slow = run(speed.LOOP, "large", 12, 0.1)
    assert speed.judge_speed([compiled, large, slow], goals=True).verdict == "wrong"


def test_a_model_is_drawn_where_it_is_wanted() -> None:
    model = models.random_model(models.TINY, "sdpa", "meta")
    assert {each.device.type for each in model.parameters()} == {"meta"}


def test_only_steps_are_timed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what frees the memory afterwards; and what a run left behind is freed before the next."""
    clock = [0.0]
    order: list[str] = []

    def collect() -> int:
        order.append("collect")
        clock[0] += 100
        return 0

    def step() -> None:
        order.append("step")
        clock[0] += 1

    monkeypatch.setattr(speed.gc, "collect", collect)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    run = speed.Run(speed.OURS, "tiny", "somehow")
    size = replace(models.TINY, rows=(4, 6))
    made = models.random_rows(size.rows, 61)
    assert speed._measured(run, lambda: step, size, made, machine).tokens_per_s == 10
    assert order == ["collect"] + ["step"] * (1 + speed.STEPS)


@pytest.mark.parametrize(("size", "billions"), [(models.LARGE, 0.596), (models.LARGER, 1.72)])
def test_operations_are_those_of_a_model_of_that_size(size: models.Size, billions: float) -> None:
    """6 a parameter and token of the body, 6 of the head, and attention on top."""
    made = models.random_rows(size.rows, size.config["vocab_size"])
    tokens = sum(size.rows)
    assert 6 * billions * 1e9 * tokens < speed.operations_of(size, made)
    assert speed.operations_of(size, made) < 1.6 * 6 * billions * 1e9 * tokens


def test_steps_are_compared_and_a_wrong_one_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parity.check(machine).verdict == "right"
    step = parity._step

    def off(variant: parity.Variant, device: str) -> Any:
        done = step(variant, device)
        calls.append(device)
        if len(calls) % 2:  # every second one is the other device's
            moved = {name: tensor * 1.01 for name, tensor in done.moved.items()}
            entropy = 0.99 * done.metrics["entropy"]
            return replace(done, metrics=done.metrics | {"entropy": entropy}, moved=moved)
        return done

    calls: list[str] = []
    monkeypatch.setattr(parity, "_step", off)
    found = parity.check(machine)
    assert found.verdict == "wrong"
    assert [row[1:] for row in found.rows] == [["0e+00", "1e-02", "0e+00", "1e-02"]] * 5


def test_what_a_step_fails_of_is_its_row(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows are there."""
    step = parity._step

    def broken(variant: parity.Variant, device: str) -> Any:
        if variant.kind == "sinks":
            raise RuntimeError("No choices exist |\nfor backend.")
        return step(variant, device)

    monkeypatch.setattr(parity, "_step", broken)
    found = parity.check(machine)
    failed = ["sinks", "RuntimeError: No choices exist / for backend.", "", "", ""]
    assert (found.verdict, found.rows[3], len(found.rows)) == ("wrong", failed, 5)
    assert found.said.endswith("; failed: sinks")


def test_a_step_goes_to_the_experts_that_its_rows_name() -> None:
    torch.set_num_threads(1)
    replayed = next(one for one in parity.VARIANTS if one.routes)
    own = parity._step(replace(replayed, routes=False), "cpu").moved
    assert parity._apart(parity._step(replayed, "cpu").moved, own) > 10 * parity.BOUND


def test_a_profile_names_what_takes_the_time(machine: Machine) -> None:
    found = profile.check(machine)
    assert any("mm" in row[0] for row in found.rows)
    trace = json.loads((machine.folder / "step.json").read_text())
    assert trace["traceEvents"]


def test_a_kernels_time_counts_once() -> None:
    """torch gives it to the kernel, to the operator that started it, and to ranges around it."""

    def event(key: str, kind: DeviceType, micros: int, *, named: bool = False) -> Any:
        return SimpleNamespace(
            key=key, device_type=kind, self_device_time_total=micros, is_user_annotation=named
        )

    events = [
        event("aten::mm", DeviceType.CPU, 100),
        event("sm90_xmma_gemm", DeviceType.CUDA, 100),
        event("Optimizer.step", DeviceType.CUDA, 100, named=True),
    ]
    assert [one.key for one in profile._at_work(events, on_gpu=True)] == ["sm90_xmma_gemm"]
    assert len(profile._at_work(events, on_gpu=False)) == 3


def test_each_dtype_is_judged_by_itself() -> None:
    def rows(dtype: str, right: str = "within", stale: str = "refused") -> list[list[str]]:
        pushes = (("right", right), ("right", "within"), ("first block stale", stale))
        return [[dtype, push, "", "", "", verdict] for push, verdict in pushes]

    asked = ["bfloat16", "fp8"]
    assert serving.judge_precision(asked, rows("bfloat16") + rows("fp8")).verdict == "right"
    refused = serving.judge_precision(asked, rows("bfloat16", right="refused") + rows("fp8"))
    assert (refused.verdict, refused.said[-14:]) == ("wrong", ", not bfloat16")
    stale = rows("bfloat16", stale="within") + rows("fp8")
    assert serving.judge_precision(asked, stale).verdict == "wrong"
    silent = [*rows("bfloat16"), ["fp8", "does not start: no kernel", "", "", "", ""]]
    assert serving.judge_precision(asked, silent).verdict == "wrong"


def test_each_transport_is_judged_by_itself() -> None:
    def row(name: str, *said: str) -> list[str]:
        return [name, "0.1", "1e-3", *(said or ("within", "refused", ""))]

    left = row("nccl", "not run", "not run", "needs two GPUs")
    found = pushes.judge_pushes([row("files"), row("ipc"), left])
    assert (found.verdict, found.said) == (
        "right",
        "2 of 2 transports push what is served; not run: nccl",
    )
    for wrong in (
        row("ipc", "refused", "refused", ""),
        row("ipc", "within", "within", ""),
        row("ipc", "within", "refused", "by files"),
        row("ipc", "failed", "failed", "no room"),
    ):
        found = pushes.judge_pushes([row("files"), wrong])
        assert (found.verdict, found.said[-9:]) == ("wrong", ", not ipc")


def test_each_sleep_is_judged_by_itself() -> None:
    def row(*served: str, freed: str = "900", note: str = "") -> list[str]:
        return ["level 2", freed, *(served or ["within"] * 3), note]

    def verdict(*rows: list[str], frees: bool = True) -> str:
        return sharing.judge_sharing(list(rows), frees=frees).verdict

    assert verdict(row(), row()) == "right"
    assert verdict(row(freed="–"), frees=False) == "right"
    for wrong in (
        row("within", "served", "within"),  # nobody noticed
        row("within", "refused", "within"),  # what was served before is not back
        row("within", "within", "refused"),
        row(freed="0"),
        row(freed="", note="ChildError: vllm exited"),
    ):
        assert verdict(row(), wrong) == "wrong"


def test_what_a_transport_needs_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "m2n_missing", lambda: None)
    assert [name for name, lacks in pushes.transports(0).items() if not lacks] == ["files", "gloo"]
    assert [name for name, lacks in pushes.transports(1).items() if lacks] == ["nccl", "nccl_m2n"]
    assert not any(pushes.transports(2).values())


def test_all_checks_fit_into_the_budget_and_those_without_vllm_into_a_quarter() -> None:
    """By the estimates with which the program begins them: none has run on a GPU."""
    assert sum(check.seconds for check in program.CHECKS) <= program.BUDGET_S
    names = [check.name for check in program.CHECKS]
    assert len(set(names)) == len(names)
    alone = [check for check in program.CHECKS if not check.needs_vllm]
    assert list(program.CHECKS[: len(alone)]) == alone
    first = names[: names.index("speed") + 1]
    assert first == ["kernels", "collectives", "parity", "speed"]
    assert sum(check.seconds for check in program.CHECKS[:4]) <= 540
    assert names.index("pushes by each transport") < names.index("serve, ten pushes and a kill")


def test_an_exported_row_is_held_against_itself(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order a batch puts its rows in."""
    monkeypatch.setattr(checkpoints, "TINY", replace(models.TINY, rows=(10, 40)))
    assert checkpoints.check_export(machine).verdict == "right"


def test_one_rank_has_no_speed() -> None:
    """It copies its own memory."""
    found = {"all_reduce": [0.0, 900.0], "objects": [0.0, 0.0]}
    alone = collectives.judge_collectives(1, found)
    assert (alone.verdict, alone.said) == ("right", "1 rank")
    assert alone.rows == [["all_reduce", "0e+00", "–"], ["objects", "0e+00", "–"]]
    assert collectives.judge_collectives(2, found).rows[0][2] == "900.0"


@pytest.mark.slow  # torchrun
def test_collectives_are_right_on_two_ranks(machine: Machine) -> None:
    found = collectives.check(machine)
    assert (found.verdict, found.said) == ("right", "2 ranks")
    assert {row[1] for row in found.rows} == {"0e+00"}


def test_a_checkpoint_and_an_export_come_back(machine: Machine) -> None:
    assert checkpoints.check_saved(machine).verdict == "right"
    found = checkpoints.check_export(machine)
    assert found.verdict == "right"
    assert "over 28 tokens" in found.said
    assert sorted(path.name for path in machine.folder.iterdir()) == []


@pytest.mark.parametrize("lost", [("exp_avg",), ("step",), ("exp_avg", "exp_avg_sq", "step")])
def test_a_checkpoint_without_the_optimizers_state_is_told(
    lost: tuple[str, ...], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = checkpoints.load_checkpoint

    def loses(learner: Any, folder: Path) -> Any:
        found = load(learner, folder)
        for state in learner.optimizer.state.values():
            for name in lost:
                state[name].zero_()
        return found

    monkeypatch.setattr(checkpoints, "load_checkpoint", loses)
    found = checkpoints.check_saved(machine)
    assert found.verdict == "wrong"
    assert found.said.startswith("weights equal, ")


def test_an_export_that_says_what_the_model_said_before_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the weights before the step, or a step that was none."""
    save = checkpoints.save_hf

    def before_the_step(_: object, out: Path) -> None:
        save(models.random_model(models.TINY, "sdpa"), out)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_hf", before_the_step)
        assert checkpoints.check_export(machine).verdict == "wrong"
    monkeypatch.setattr(checkpoints, "EXPORT_LR", 1e-6)
    assert checkpoints.check_export(machine).verdict == "wrong"


def test_a_resumed_run_is_judged_by_what_its_weights_decide() -> None:
    def run(**changed: float) -> list[dict[str, float]]:
        last = {"loss": -0.1, "entropy": 5.8, "grad_norm": 0.4} | changed
        return [{"loss": -0.1, "entropy": 5.9, "grad_norm": 0.5}, last, last]

    def verdict(before: int, found: list[dict[str, float]]) -> str:
        return resume.judge_resumed(before, 3, run(), found).verdict

    assert verdict(2, run()) == "right"
    assert verdict(3, run()) == "wrong", "nothing was left to resume"
    assert verdict(1, run()) == "wrong", "killed before its checkpoint"
    assert verdict(2, run()[:2]) == "wrong"
    others = [("loss", -0.2), ("entropy", 5.9), ("grad_norm", 0.5), ("loss", float("nan"))]
    for name, value in others:
        assert verdict(2, run(**{name: value})) == "wrong", name


@pytest.mark.slow  # two processes that train; tests/faults has many kills
@pytest.mark.timeout(3600)  # `resume.check` itself ends a run that makes no progress
def test_a_killed_run_is_compared(machine: Machine) -> None:
    found = resume.check(machine)
    assert found.verdict == "right", found
    assert found.said.endswith("6 of 6 agree")
    assert len({row[1] for row in found.rows}) == 6, "a loss that no weights change"


@pytest.mark.parametrize(
    ("busy", "bounds"),
    [("while True: pass", (0.2, 1e9)), ("import time; time.sleep(1e6)", (1e9, 0.3))],
)
def test_a_run_without_progress_is_ended(
    busy: str, bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that computes for ever, and one that waits for ever."""
    monkeypatch.setattr(resume, "STEP_CPU_S", bounds[0])
    monkeypatch.setattr(resume, "STILL_S", bounds[1])
    resume._fill(tmp_path / "state", 1)
    stuck = subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
    with pytest.raises(TimeoutError, match="state: after 0 steps none for"):
        resume._finish(stuck, tmp_path / "state")
    assert stuck.poll() == -signal.SIGKILL


def test_what_a_cpu_cannot_say_is_not_run(machine: Machine) -> None:
    assert memory.check_estimate(machine).verdict == "not run"
    found = memory.check_long_rows(machine)
    assert found.verdict == "not run"
    assert len(found.rows) == 8


def test_what_a_layer_fails_of_is_its_row(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peaks(_: Machine, config: Any, tokens: int, tree: bool) -> tuple[float, float]:
        if tree and config.model_type == "gemma2" and tokens > 100:
            raise torch.OutOfMemoryError("full")
        return (tokens**2 if config.model_type == "gpt_oss" and tree else tokens) * 2.0**30, 1.0

    monkeypatch.setattr(memory, "_layer_memory", peaks)
    found = memory.check_long_rows(machine)
    assert found.verdict == "wrong"
    assert found.rows[3] == ["Gemma 2 9B, cap, a tree", "128", "OutOfMemoryError: full", ""]
    assert len(found.rows) == 8
    assert found.said == (
        "memory grows with the square of a row: GPT-OSS 20B, sinks, a tree;"
        " failed: Gemma 2 9B, cap, a tree"
    )


def test_a_served_run_begins_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that an earlier one took are not its own."""
    left = machine.folder / "run" / "store.db"
    left.parent.mkdir()
    left.touch()

    class Begun(Exception):
        pass

    def begin(_: str) -> None:
        assert not left.exists()
        raise Begun

    monkeypatch.setattr(serving, "import_module", begin)
    with pytest.raises(Begun):
        serving.check_served(machine)


# The program


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, float]]:
    """Three checks that run here; the names of those that were run, and how long each might."""
    ran: list[tuple[str, float]] = []

    def in_a_process(check: Check, _: object, __: object, timeout_s: float) -> dict[str, Any]:
        ran.append((check.name, timeout_s))
        return check.run(Machine(CPU, True, tmp_path)).as_json()

    def one(name: str, verdict: Any, seconds: int) -> Check:
        finding = Finding(verdict=verdict, said=f"{name} it is", header=("a",), rows=[["1"]])
        return Check(name, seconds, lambda _: finding)

    made = (one("first", "right", 1), one("second", "right", 50), one("third", "wrong", 1))
    monkeypatch.setattr(program, "CHECKS", made)
    monkeypatch.setattr(program, "_in_a_process", in_a_process)
    return ran


def run(folder: Path, *more: str) -> int:
    return program.main(["--device", "cpu", "--tiny", "--out", str(folder), *more])


def names(ran: list[tuple[str, float]]) -> list[str]:
    return [name for name, _ in ran]


def test_it_goes_on_where_it_stopped(
    checks: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--budget-s", "20", "--only", "first", "second") == 3
    assert names(checks) == ["first"]
    assert "- not run yet: second" in capsys.readouterr().out
    assert run(tmp_path, "--only", "first", "second") == 0
    assert names(checks) == ["first", "second"]
    assert run(tmp_path) == 1
    assert names(checks) == ["first", "second", "third"]
    page = (tmp_path / "page.md").read_text()
    assert page == capsys.readouterr().out.partition("# What")[1] + page.partition("# What")[2]
    for line in ("| first | right | 0 | first it is |", "| third | wrong | 0 | third it is |"):
        assert line in page
    assert run(tmp_path, "--again", "--only", "first") == 1
    assert names(checks)[3:] == ["first"]


def test_what_was_not_right_is_repeated_behind_what_has_not_run(
    checks: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "CHECKS", program.CHECKS[::-1])
    assert run(tmp_path, "--only", "third") == 1
    assert run(tmp_path) == 1
    assert names(checks) == ["third", "second", "first", "third"]
    page = (tmp_path / "page.md").read_text()
    assert page.index("| third |") < page.index("| second |") < page.index("| first |")


def test_no_check_goes_on_beyond_the_budget(
    checks: list[tuple[str, float]], tmp_path: Path
) -> None:
    run(tmp_path, "--budget-s", "60")
    (_, first), (_, second), _ = checks
    assert first == 3
    assert 59 < second <= 60


def test_what_needs_vllm_says_so_without_it_and_takes_no_time(
    checks: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (replace(program.CHECKS[1], needs_vllm=True), program.CHECKS[0])
    monkeypatch.setattr(program, "CHECKS", asked)
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert run(tmp_path, "--budget-s", "20") == 3
    assert names(checks) == ["first"]
    page = (tmp_path / "page.md").read_text()
    assert "| second | not run | 0 | vLLM is not installed (pip install tracegrad[vllm]) |" in page
    monkeypatch.setattr(program, "find_spec", lambda name: object())
    assert run(tmp_path) == 0
    assert names(checks) == ["first", "second"]


def test_what_other_code_found_does_not_count(
    checks: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changed in ("_digest", "_versions"):
        run(tmp_path, "--only", "first")
        run(tmp_path, "--only", "first")
        monkeypatch.setattr(program, changed, lambda *_: "another")
        run(tmp_path, "--only", "first")
    assert names(checks) == ["first"] * 3


def test_code_is_known_by_what_it_says(tmp_path: Path) -> None:
    """Committed or not, with git or without."""
    for folder in ("bench", "trainer/inside", "trainer/__pycache__", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "trainer/inside/code.py").write_text("one")
    before = program._digest(tmp_path)
    (tmp_path / "docs/gpu-check.md").write_text("what was seen")
    (tmp_path / "trainer/__pycache__/code.pyc").write_text("compiled")
    assert program._digest(tmp_path) == before
    (tmp_path / "trainer/inside/code.py").write_text("two")
    changed = program._digest(tmp_path)
    (tmp_path / "bench/new.py").write_text("")
    assert len({before, changed, program._digest(tmp_path)}) == 3


def test_without_git_there_is_a_page(
    checks: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(tmp_path, "--only", "first") == 0
    assert "no git here" in (tmp_path / "page.md").read_text()


def test_a_check_that_ends_badly_is_wrong_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run(tmp_path, "--only", "kernels", "collectives") == 1
    page = capsys.readouterr().out
    assert page.count("exited with 1") == 2


def test_its_processes_find_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of a folder that somebody named, and ours where they are not installed."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere/packages")
    first, *others = our_path()["PYTHONPATH"].split(os.pathsep)
    assert first == str(ROOT)
    assert {str(ROOT / "sdk"), str(ROOT / "trainer"), "/somewhere/packages"} <= set(others)
    # A Python that says what it was started with.
    spy = tmp_path / "python"
    spy.write_text('#!/bin/sh\necho "$PYTHONPATH"\nexit 1\n')
    spy.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(spy))
    assert run(tmp_path, "--only", "kernels") == 1
    assert collectives.check(Machine(CPU, True, tmp_path)).verdict == "wrong"
    for log in ("kernels.log", "ranks.log"):
        assert (tmp_path / log).read_text().strip() == our_path()["PYTHONPATH"]
