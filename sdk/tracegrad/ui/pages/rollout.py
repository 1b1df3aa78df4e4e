"""One rollout: what it was asked, how it ended, its rewards, its time, its turn tree, and a window
of its turns as a conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tracegrad.events import Reward, Turn
from tracegrad.inspect.display_text import finish_reason_text, format_number
from tracegrad.inspect.forks import expected_parent
from tracegrad.inspect.reasons import (
    ReasonText,
    describe_failed_scorings,
    describe_idle,
    fork_text,
    rollout_reason,
    untrained_reason,
    untrained_text,
    waiting_text,
)
from tracegrad.inspect.rollout_time import STAGES, RolloutTime, time_of
from tracegrad.inspect.transcript import RepeatedMessages, Transcript
from tracegrad.inspect.tree_layout import TurnChain, turn_chains
from tracegrad.inspect.turn_standing import (
    DispositionKind,
    RewardStandings,
    disposition_text,
    late_by,
)
from tracegrad.jsonutil import text_or_json
from tracegrad.store import RolloutDetail, Store
from tracegrad.store.read.rollout_moments import load_moments
from tracegrad.store.read.rollout_outline import (
    RolloutOutline,
    TurnSize,
    rollout_outline,
    with_texts,
)
from tracegrad.store.read.task_titles import input_text, title_of_task
from tracegrad.ui.pages import tasks
from tracegrad.ui.pages.messages import (
    SHORT,
    LeftOut,
    Room,
    ShownMessage,
    ShownText,
    shown_message,
    shown_news,
    shown_text,
)
from tracegrad.ui.pages.rollouts import PATH, ListQuery, path_of
from tracegrad.ui.paging import link

WINDOW = 20  # turns of a page
# In a rollout of no more turns each fork is compared with all turns before it.
_COMPARED = 100
_MOST_REWARDS = 200
_MOST_CHAINS = 60  # branches of the tree that are listed
_DEEPEST = 8  # levels that are indented
_MOST_TOOLS = 200  # names of a turn's tools
# Characters of the texts of a page, shared by its turns.
CHARACTERS = 4_000_000


class ShownReward(NamedTuple):
    """`status`: what became of it, if anything did."""

    value: str
    name: str
    source: str
    label: str
    comment: str
    at: float
    turn: str
    status: str
    kind: Literal["counts", "revised", "late", "part"]


@dataclass(frozen=True, slots=True)
class ShownFork:
    reason: str
    text: ReasonText
    instead_of: int | None


@dataclass(frozen=True, slots=True)
class ShownTurn:
    number: int
    turn: Turn
    size: TurnSize
    heading: str  # "continues turn 3", or nothing
    after_s: float
    disposition: str
    kind: DispositionKind
    meaning: ReasonText | None
    finish: str
    tools: list[str]
    more_tools: int  # beside those
    rewards: list[ShownReward]
    earlier_rewards: int  # before those
    fork: ShownFork | None
    news: list[ShownMessage | RepeatedMessages | LeftOut]
    reply: ShownMessage | None
    has_text: bool
    tokens: str  # where they are shown

    @property
    def versions(self) -> str:
        used = [(version, count) for version, count in self.size.versions if count]
        if len(used) == 1:
            return f"version {used[0][0]}"
        return ", ".join(f"{count:,} tokens by version {version}" for version, count in used)


@dataclass(frozen=True, slots=True)
class ShownChain:
    """Turns of which each continues the one before, in the tree. `forked`: why it begins."""

    first: int
    last: int
    turns: int
    depth: int
    forked: str
    href: str
    is_here: bool


class TimePiece(NamedTuple):
    """`x` and `width` are thousandths of the whole."""

    stage: str
    what: str
    seconds: float
    share: float
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class RolloutView:
    """All that the page shows."""

    detail: RolloutDetail
    title: str | None
    asked: ShownText | None
    turns: list[ShownTurn]
    first: int
    total: int
    sampled: int
    sent: int
    rewards: list[ShownReward]  # of the whole rollout, the newest
    earlier_rewards: int  # of it, before those
    turn_rewards: int
    chains: list[ShownChain]
    more_chains: int
    time: RolloutTime
    pieces: list[TimePiece]
    training: list[tuple[str, ReasonText | None, int]]  # state or reason, its words, turns
    idle: str | None
    failed_scorings: list[str] = field(default_factory=list)


def rollout_view(
    store: Store,
    rollout_id: str,
    first: int,
    window: int = WINDOW,
    *,
    characters: int = CHARACTERS,
    single: bool = False,
) -> RolloutView:
    """With the turns from `first` on, `window` of them. `characters`: of texts that there is room
    for. `single`: links lead within the page. Raises `UnknownRollout` or `AmbiguousRollout`."""
    with store.reading() as connection:
        outline = rollout_outline(connection, rollout_id)
        total = len(outline.detail.turns)
        first = max(0, min(first, total - 1)) if total else 0
        numbers = range(first, min(first + window, total))
        texts = with_texts(connection, outline, _needed(outline, numbers))
        [moments] = load_moments(connection, [outline.detail.summary.rollout_id])
    detail = outline.detail
    standings = RewardStandings(detail)
    whole = standings.of_turn(None)
    time = time_of(moments)
    chains, more = _chains(detail, numbers, single=single)
    task = detail.summary.task_id
    return RolloutView(
        detail=detail,
        title=title_of_task(task, input_text(detail.task)),
        asked=None if detail.task is None else shown_text(text_or_json(detail.task), SHORT),
        turns=list(_turns(outline, texts, numbers, standings, characters)),
        first=first,
        total=total,
        sampled=sum(size.sampled for size in outline.sizes),
        sent=sum(size.prompt for size in outline.sizes),
        rewards=[_reward(reward, detail, standings) for reward in whole[-_MOST_REWARDS:]],
        earlier_rewards=max(0, len(whole) - _MOST_REWARDS),
        turn_rewards=len(detail.rewards) - len(whole),
        chains=chains,
        more_chains=more,
        time=time,
        pieces=_pieces(time),
        training=_training(detail),
        idle=describe_idle(detail.summary, detail.trainer_idle_s),
        failed_scorings=describe_failed_scorings(detail.failed_scorings),
    )


def page_of_turn(turn: int) -> int:
    """The first turn of the page that has it."""
    return turn - turn % WINDOW


def rollout_values(view: RolloutView, query: ListQuery) -> dict[str, Any]:
    """What the template needs."""
    here = path_of(view.detail.summary.rollout_id)
    last = view.first + len(view.turns)
    earlier = max(0, view.first - WINDOW)
    return {
        "view": view,
        "row": view.detail.summary,
        "path": here,
        "task": tasks.path_of(view.detail.summary.task_id or ""),
        "up": link(PATH, query.pairs),
        "newer": link(f"{here}/newer", query.pairs),
        "older": link(f"{here}/older", query.pairs),
        "earlier": link(here, query.pairs, turn=str(earlier)) if view.first else None,
        "later": link(here, query.pairs, turn=str(last)) if last < view.total else None,
        "stages": STAGES,
    }


# Turns


def _needed(outline: RolloutOutline, numbers: range) -> set[int]:
    """The turns whose texts say what is new in these: their parents, and of forks those before."""
    turns = outline.detail.turns
    if len(turns) <= _COMPARED:
        return set(range(numbers.stop))
    place = {turn.turn_id: number for number, turn in enumerate(turns)}
    needed = set(numbers)
    for number in numbers:
        parent = place.get(turns[number].parent_id or "")
        if parent is not None:
            needed.add(parent)
        elif number:
            needed.add(number - 1)
    return needed


def _turns(
    outline: RolloutOutline,
    texts: dict[int, Turn],
    numbers: range,
    standings: RewardStandings,
    characters: int,
) -> Iterator[ShownTurn]:
    """What one of them leaves of its share of the room is there for those behind it."""
    order = sorted(texts)
    transcript = Transcript([texts[number] for number in order])
    said_above = rollout_reason(outline.detail)
    for number in numbers:
        room = Room(max(0, characters) // (numbers.stop - number))
        yield _turn(number, order, transcript, outline, standings, said_above, room)
        characters -= room.used


def _turn(
    number: int,
    order: Sequence[int],
    transcript: Transcript,
    outline: RolloutOutline,
    standings: RewardStandings,
    said_above: str | None,
    room: Room,
) -> ShownTurn:
    detail, at = outline.detail, order.index(number)
    turn = detail.turns[number]
    disposition, kind = disposition_text(turn, detail)
    missing = untrained_reason(turn, detail)
    say = missing is not None and missing.final and missing.reason != said_above
    reply = transcript.reply(at)
    # The reply comes first, with half of the room: neither it nor what it answers goes without.
    half = Room(room.characters // 2)
    shown_reply = shown_message(reply, half) if reply is not None else None
    room.used += half.used
    news = [
        RepeatedMessages(each.messages, order[each.of_turn])
        if isinstance(each, RepeatedMessages)
        else each
        for each in transcript.new_messages(at)
    ]
    tools = transcript.tools(at)
    if at and tools == transcript.tools(at - 1):
        tools = []
    rewards = standings.of_turn(number)
    return ShownTurn(
        number=number,
        turn=turn,
        size=outline.sizes[number],
        heading=_heading(number, turn, outline),
        after_s=max(0.0, turn.created_at - detail.summary.opened_at),
        disposition=disposition,
        kind=kind,
        meaning=untrained_text(missing.reason) if missing is not None and say else None,
        finish=finish_reason_text(turn),
        tools=tools[:_MOST_TOOLS],
        more_tools=max(0, len(tools) - _MOST_TOOLS),
        rewards=[_reward(each, detail, standings) for each in rewards[-_MOST_REWARDS:]],
        earlier_rewards=max(0, len(rewards) - _MOST_REWARDS),
        fork=_fork(at, order, turn, transcript),
        news=shown_news(news, room),
        reply=shown_reply,
        has_text=transcript.turns[at].request is not None,
        tokens=f"{path_of(turn.rollout_id)}/turns/{number}/tokens",
    )


def _heading(number: int, turn: Turn, outline: RolloutOutline) -> str:
    if turn.parent_id is None:
        return "starts afresh" if number else ""
    parent = outline.number_of(turn.parent_id)
    if parent == number - 1:
        return ""
    return f"continues turn {'?' if parent is None else parent}"


def _fork(at: int, order: Sequence[int], turn: Turn, transcript: Transcript) -> ShownFork | None:
    if not turn.fork_reason:
        return None
    rival = expected_parent(at, transcript) if transcript.all_messages(at) else None
    return ShownFork(
        turn.fork_reason,
        fork_text(turn.fork_reason),
        order[rival] if rival is not None else None,
    )


# What stands above the turns


def _reward(reward: Reward, detail: RolloutDetail, standings: RewardStandings) -> ShownReward:
    turn = standings.turn(reward)
    where = ""
    if turn is not None:
        where = f"turn {turn}"
    elif reward.turn is not None:
        where = f"turn {reward.turn}, which is not there"
    kind: Literal["counts", "revised", "late", "part"]
    kind, status = "counts" if standings.counts(reward) else "part", ""
    if detail.came_late(reward):
        kind, status = "late", f"came {late_by(detail)}: not used"
    elif not (standings.is_latest(reward) or standings.is_latest(reward, in_time=True)):
        kind, status = "revised", "revised by a later one"
    elif reward.turn is not None and turn is None:
        status = "for no turn: not used"
    elif standings.is_part(reward):
        status = "a part of the composed one"
    elif not standings.is_latest(reward):
        status = "training took this one"
    return ShownReward(
        "taken back" if reward.value is None else format_number(reward.value),
        reward.name,
        reward.source,
        reward.label or "",
        reward.comment or "",
        reward.created_at,
        where,
        status,
        kind,
    )


def _training(detail: RolloutDetail) -> list[tuple[str, ReasonText | None, int]]:
    """How many turns were trained, and why others were not, the most frequent first."""
    reasons: Counter[str] = Counter()
    trained = 0
    for turn in detail.turns:
        missing = untrained_reason(turn, detail)
        if missing is None:
            trained += 1
        else:
            reasons[missing.reason] += 1
    found: list[tuple[str, ReasonText | None, int]] = []
    if trained:
        found.append((f"trained in step {detail.summary.consumed_step}", None, trained))
    if not detail.turns:
        reason = rollout_reason(detail)
        if reason is not None:
            found.append((reason, waiting_text(reason, detail), 0))
    found += [(why, waiting_text(why, detail), turns) for why, turns in reasons.most_common()]
    return found


def _pieces(time: RolloutTime) -> list[TimePiece]:
    whole, at, found = time.whole_s or 1.0, 0.0, []
    for stage, seconds in time.stages.items():
        share = seconds / whole
        found.append(
            TimePiece(
                stage, STAGES[stage], seconds, share, round(1000 * at, 2), round(1000 * share, 2)
            )
        )
        at += share
    return found


def _chains(detail: RolloutDetail, here: range, *, single: bool) -> tuple[list[ShownChain], int]:
    """The tree, one line a chain, and how many there are beyond those that are listed."""
    roots = turn_chains(detail.turns)
    path = path_of(detail.summary.rollout_id)
    waiting: list[tuple[TurnChain, int]] = [(root, 0) for root in reversed(roots)]
    found: list[ShownChain] = []
    total = 0
    while waiting:
        chain, depth = waiting.pop()
        total += 1
        waiting += [(branch, depth + 1) for branch in reversed(chain.branches)]
        if len(found) >= _MOST_CHAINS:
            continue
        first = chain.turns[0]
        anchor = f"#turn-{first}"
        found.append(
            ShownChain(
                first,
                chain.turns[-1],
                len(chain.turns),
                min(depth, _DEEPEST),
                detail.turns[first].fork_reason or "",
                anchor if single else f"{path}?turn={first}{anchor}",
                any(turn in here for turn in chain.turns),
            )
        )
    return found, total - len(found)
