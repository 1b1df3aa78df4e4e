"""`trainer step --dry-run`: what would be trained, and why the rest would not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.text import Text

from tracegrad.inspect.display_text import one_line
from tracegrad.inspect.reasons import untrained_text
from tracegrad.store import IncompleteGroup, Store, StoreError
from tracegrad.store.read.scorings import ScoringFailure
from tracegrad.store.read.task_titles import short_task_ids
from tracegrad.text_format import format_age, format_count, format_elapsed, shorten_apart
from tracegrad_trainer.cli.render_status import describe_unusable
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.rewards.judge_groups import JudgeGroup
from tracegrad_trainer.rl.dry_run import GroupPlan, MicroBatchLoad, StepPlan, plan_step
from tracegrad_trainer.rl.wait_reason import describe_inferred_open
from tracegrad_trainer.utils.console import PlainTable, plain_table, print_json, print_report

WOULD_TRAIN, NOTHING, BAD_USAGE = 0, 3, 2
MAX_GROUPS_SHOWN = 20  # lines of a table
MAX_REWARDS_SHOWN = 8
MAX_TITLE_SHOWN = 40  # characters


def show_dry_run(settings: TrainerSettings, console: Console, as_json: bool) -> int:
    """0: the next step would train something; 3: nothing (as `trainer step` ends); 2: a wrong
    setting or a store that is no use, in one line."""
    try:
        with Store.open(settings.proxy.store, create=False) as store:
            plan = plan_step(settings, store)
    except (StoreError, ValueError, OSError) as error:
        print(f"trainer step --dry-run: {error}", file=sys.stderr)
        return BAD_USAGE
    if as_json:
        print_json(asdict(plan))
    else:
        print_report(render_plan(plan), console)
    return WOULD_TRAIN if plan.trained else NOTHING


def render_plan(plan: StepPlan) -> RenderableType:
    titles = _titles(plan.titles | {group.group_id: group.title for group in plan.groups})
    parts: list[RenderableType] = [_headline(plan)]
    if plan.note is not None:
        parts.append(Text(f"note: {plan.note}", style="yellow"))
    parts.append(Text(f"rollouts are weighed by objective.advantage = '{plan.rule}'", style="dim"))
    parts += [Text(line, style="dim") for line in _inferred(plan)]
    parts += [Text(line, style="yellow") for line in plan.unmatched]
    if plan.given_back:
        parts.append(Text("what is ready would be given back, and not be used up", style="yellow"))
    if plan.trained and plan.share < 1:
        parts.append(Text(_share(plan), style="yellow"))
    if plan.groups:
        parts += [Text(), _groups(plan.groups, titles)]
    if plan.loads:
        parts += [Text(), _loads(plan.loads, plan.budget)]
    if (share := plan.stats.get("expert_routing_known_share")) is not None and plan.trained:
        parts += [Text(), _routes(share)]
    if plan.compares_states and plan.groups:
        parts += [Text(), _states(plan.stats)]
    if plan.skipped or plan.passed:
        parts += [Text(), _reasons(plan.skipped, plan.passed)]
    if plan.judge_groups:
        parts += [Text(), _judge_groups(plan.judge_groups)]
    if plan.waiting:
        parts += [Text(), _waiting(plan.waiting, titles)]
    if plan.scoring_failures:
        parts += [Text(), _failures(plan.scoring_failures)]
    elsewhere = {state: n for state, n in plan.pending.items() if state != "waiting"}
    if elsewhere:
        states = ", ".join(f"{n} {state}" for state, n in sorted(elsewhere.items()))
        parts += [Text(), Text(f"turns that no step would look at yet: {states}")]
        if "no_task" in elsewhere:
            words = untrained_text("no_task")
            parts += [Text(f"no_task: {words.meaning}"), Text(f"→ {words.fix}", style="dim")]
    return Lines(*parts)


def _headline(plan: StepPlan) -> Text:
    if not plan.trained:
        what = "nothing to train" if not plan.groups else "nothing of what is ready can be trained"
        return Text(f"step {plan.step}: {what}", style="bold yellow")
    targets = sum(load.targets for load in plan.loads)
    text = Text(f"step {plan.step}", style="bold")
    few = f" (of {plan.wanted} wanted)" if len(plan.groups) < plan.wanted else ""
    more = f"; {plan.more} more {'is' if plan.more == 1 else 'are'} ready" if plan.more else ""
    groups, turns = format_count(len(plan.groups), "group"), format_count(plan.trained, "turn")
    return text.append(
        f" on version {plan.version}: {groups}{few}, {turns}, {plan.tokens} tokens,"
        f" {targets} of them trained{more}",
        style="not bold",
    )


def _inferred(plan: StepPlan) -> Iterator[str]:
    """Of rollouts that nobody opened: which would be closed now, and which stay open."""
    if plan.idle:
        closed = format_count(plan.idle, "rollout")
        yield f"{closed} would be closed after {plan.idle_s:g} s without a call (data.idle_s)"
    if left := describe_inferred_open(plan.inferred_open, plan.idle_s):
        yield left
    if plan.live_prompts is not None:
        prompts = format_count(plan.live_prompts, "live prompt")
        why = f"; not: {describe_unusable(plan.not_resampled)}" if plan.not_resampled else ""
        yield f"{prompts} would be sampled again (resample.prompts){why}"
    if plan.judge_groups is not None:
        ready = plan.uses.get("rewards.judge.groups", [])
        alone = sum(group.smaller_in_s is None for group in plan.judge_groups)
        yield (
            f"{format_count(len(ready), 'rollout')} without a task would be judged with similar"
            f" ones (rewards.judge.groups); not: {alone} without a similar one,"
            f" {plan.not_judged} that {'does' if plan.not_judged == 1 else 'do'} not say what"
            f" {'it was' if plan.not_judged == 1 else 'they were'} asked"
        )


def _share(plan: StepPlan) -> str:
    trained = plan.stats["groups_trained"]
    return (
        f"{trained:.0f} of the {plan.wanted} groups that are wanted would be trained: the step"
        f" counts for {plan.share:.2g} of one (optim.scale_by_groups)"
    )


def _groups(groups: Sequence[GroupPlan], titles: Mapping[str, str]) -> PlainTable:
    columns = ("group", "rewards", "advantage", "turns", "rows", "tokens", "not trained")
    shown = plain_table(*columns, words=("rewards", "not trained"))
    for group in groups[:MAX_GROUPS_SHOWN]:
        least_greatest = group.advantages
        shown.add_row(
            titles[group.group_id],
            _rewards(group.rewards),
            f"{least_greatest[0]:+.2f} … {least_greatest[1]:+.2f}" if least_greatest else "–",
            str(group.trained),
            str(group.rows),
            str(group.tokens),
            ", ".join(f"{n} {why}" for why, n in sorted(group.skipped.items())),
            style="" if group.trained else "dim",
        )
    return _with_rest(shown, len(groups))


def _titles(titles: Mapping[str, str]) -> dict[str, str]:
    """By id what tells the tasks apart: the id that somebody chose, whole; or of what was asked the
    beginning, where it parts from others', and of the hash as much as `--task` takes."""
    asked = {task_id: one_line(title) for task_id, title in titles.items() if title != task_id}
    shown = shorten_apart(asked.values(), MAX_TITLE_SHOWN)
    short = short_task_ids(asked)
    return {
        task_id: f"{shown[asked[task_id]]} · {short[task_id]}"
        if task_id in asked
        else one_line(task_id)
        for task_id in titles
    }


def _rewards(rewards: Sequence[float]) -> str:
    shown = " ".join(f"{value:.3g}" for value in rewards[:MAX_REWARDS_SHOWN])
    rest = len(rewards) - MAX_REWARDS_SHOWN
    return f"{shown} +{rest}" if rest > 0 else shown


def _loads(loads: Sequence[MicroBatchLoad], budget: int) -> PlainTable:
    shown = plain_table("rank", "micro-batch", "rows", "tokens", "trained", "fill")
    number: dict[int, int] = {}
    for load in loads[:MAX_GROUPS_SHOWN]:
        number[load.rank] = number.get(load.rank, 0) + 1
        cells = (load.rank, number[load.rank], load.rows, load.tokens, load.targets)
        shown.add_row(*map(str, cells), f"{load.fill:.0%} of {budget}")
    return _with_rest(shown, len(loads))


def _routes(share: float) -> Text:
    """Of routing replay r3."""
    if share:
        return Text(f"the serving engine recorded the experts of {share:.1%} of these tokens")
    return Text(
        "the serving engine recorded the experts of none of these tokens: they would be routed as"
        " the router says (vLLM returns them with --enable-return-routed-experts, not in streams)",
        style="yellow",
    )


def _states(stats: Mapping[str, float]) -> Text:
    given, seen, unknown = (
        int(stats[f"states_{known}"]) for known in ("given", "observed", "unknown")
    )
    return Text(
        f"turns are compared among equal states: {format_count(given, 'state')} named by the"
        f" agent, {seen} by what was observed last, {unknown} unknown"
        + (" (such turns have their rollout's advantage alone)" if unknown else ""),
        style="yellow" if unknown else "",
    )


def _reasons(skipped: Mapping[str, int], passed: Mapping[str, int]) -> PlainTable:
    shown = plain_table("turns that would not be trained", "here", "passed over")
    for why in sorted(skipped.keys() | passed.keys()):
        shown.add_row(why, str(skipped.get(why, 0)), str(passed.get(why, 0)))
    return shown


def _waiting(waiting: Sequence[IncompleteGroup], titles: Mapping[str, str]) -> PlainTable:
    shown = plain_table("task that lacks rollouts", "ready", "open", "no reward", "no turns", "for")
    for task in waiting[:MAX_GROUPS_SHOWN]:
        cells = (len(task.ready), task.open, task.no_reward, task.no_turns)
        shown.add_row(titles[task.task_id], *map(str, cells), format_age(task.since))
    return _with_rest(shown, len(waiting))


def _judge_groups(groups: Sequence[JudgeGroup]) -> PlainTable:
    shown = plain_table("similar rollouts for the judge", "have", "lack", "judged smaller in")
    for group in groups[:MAX_GROUPS_SHOWN]:
        asked = f"{one_line(group.title)[:MAX_TITLE_SHOWN]} · {group.rollouts[0][:8]}"
        left = group.smaller_in_s
        soon = "one is compared with none" if left is None else format_elapsed(left)
        shown.add_row(asked, str(len(group.rollouts)), str(group.lacks), soon)
    return _with_rest(shown, len(groups))


def _failures(failures: Sequence[ScoringFailure]) -> PlainTable:
    shown = plain_table("scorings that failed", "rollouts", "error", words=("error",))
    for each in failures[:MAX_GROUPS_SHOWN]:
        shown.add_row(one_line(each.scorer), str(each.rollouts), one_line(each.error))
    return _with_rest(shown, len(failures))


def _with_rest(shown: PlainTable, total: int) -> PlainTable:
    if total > MAX_GROUPS_SHOWN:
        shown.add_row(f"… and {total - MAX_GROUPS_SHOWN} more", style="dim")
    return shown
