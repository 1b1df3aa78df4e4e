"""Every reason that is recorded or counted, in words, and what to do about it.

A test reads the code for reasons and holds them against these tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tracegrad.events import Turn
from tracegrad.frameworks import causes_of
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.store import RolloutDetail, RolloutSummary, Scoring
from tracegrad.store.types import HELD_OUT, LATE
from tracegrad.text_format import format_age, format_count


class ReasonText(NamedTuple):
    """`fix` is empty where nothing needs to be done."""

    meaning: str
    fix: str


# Why a turn continues no earlier one, token for token. What each means is beside its name.
_FORK_FIXES = {
    ForkReason.NEW_CONVERSATION: "",
    ForkReason.EDITED_HISTORY: "Let the agent only append to its messages: no clock, reminder or "
    "status line that changes inside earlier ones, no dropped tool results.",
    ForkReason.COMPACTION: "Nothing is wrong. Fewer compactions make longer paths: give the agent "
    "a larger context, or let it compact later.",
    ForkReason.TOOLS_CHANGED: "Offer the same tools, in the same order, with the same template "
    "arguments in every call of a conversation.",
    ForkReason.EDITED_CALLS: "Send tool calls back with the ids, names and arguments that came.",
    ForkReason.CALLS_AS_TEXT: "Send calls back in tool_calls, and their results as messages of the "
    "role tool. Of smolagents take the CodeAgent: its ToolCallingAgent writes calls as text.",
    ForkReason.EXTENDED_REPLY: "Put what is added into a message of its own behind the reply, or "
    "end replies with a stop string instead of the end token: text behind it is continued.",
    ForkReason.RESPELLED_ARGUMENTS: "Let the agent keep the reply's own text, or call tools by "
    "the API (llama-index: FunctionAgent instead of ReActAgent).",
    ForkReason.MOVED_MESSAGE: "Append what changes behind the conversation instead of moving it "
    "along (aider moves the files that it edits behind its history with every message: name those "
    "that are only read with --read).",
    ForkReason.EDITED_CONTENT: "Send the reply's text back as it came (only white space around it "
    "is forgiven).",
    ForkReason.EDITED_REASONING: "Send the reasoning back as it came, or leave it out.",
    ForkReason.NO_TEXT: "Keep texts until their rollouts end (keep_text, tracegrad prune "
    "--text-only --older-than); a proxy that goes on running remembers them.",
    ForkReason.REMOVED: "Prune what is older (tracegrad prune --older-than), or finished.",
    ForkReason.ROLLOUT_TAKEN: "Nothing is wrong. A longer data.idle_s makes fewer of them, and "
    "rewards of the whole conversation.",
    ForkReason.MEDIA: "Such turns cannot be trained yet. Keep images, audio and video out of the "
    "conversations that training needs.",
    ForkReason.OWN_RENDERING: "Leave chat_template, continue_final_message, add_special_tokens, "
    "echo and truncate_prompt_tokens out of the agent's requests.",
    ForkReason.NOTHING_NEW: "Nothing is wrong where the agent samples again or lets the model go "
    "on with its own reply; tool results and answers belong after the reply.",
    ForkReason.NO_TOKENS: "Serve with an engine that returns token ids (--upstream-kind vllm).",
    ForkReason.TOKENIZER: "Give the proxy the folder of the model's tokenizer and template: "
    "--tokenizer DIR.",
    ForkReason.NOT_AS_SENT: "Serve the engine with the chat template of the folder that the proxy "
    "reads (--tokenizer), and with no other default template arguments.",
    ForkReason.TEMPLATE_ERROR: "Serve with a template that takes the agent's messages (roles in "
    "this order, several system messages, tool calls without text).",
    ForkReason.GENERATION_PROMPT: "Serve with a template that keeps earlier replies whole "
    "(preserve_thinking, where it has that argument).",
    ForkReason.HISTORY_REWRITTEN: "Serve with a template whose earlier messages do not depend on "
    "later ones (preserve_thinking, where it has that argument).",
    ForkReason.REASONING_DROPPED: "Serve with a template that keeps the reasoning of earlier "
    "replies (preserve_thinking, where it has that argument), or switch thinking off.",
    ForkReason.CONTENT_CHANGED: "Serve with a template that keeps text as it is (no strip or trim "
    "of replies).",
    ForkReason.STOP_STRING: "Let the model's own end token end its replies, or send the stop "
    "string back with the reply (include_stop_str_in_output).",
    ForkReason.STOP_NOT_RENDERED: "Serve with a template that ends each reply with the end token.",
    ForkReason.CUT_SHORT: "Give replies more room (max_tokens).",
    ForkReason.TEMPLATE: "Read the proxy's log; another template may be provable.",
    ForkReason.TOKENS: "Serve with a template that begins each message with a special token.",
}

FORK_TEXTS = {
    reason.value: ReasonText(reason.meaning, _FORK_FIXES.get(reason, "")) for reason in ForkReason
}


def _framework_habits(reason: str) -> str:
    """What frameworks do by themselves that has this reason: each of their traps with its remedy
    (docs/frameworks.md)."""
    found: dict[tuple[str, str], list[str]] = {}
    for framework, trap in causes_of(reason):
        said = (trap.what.rstrip(".").replace("`", ""), trap.remedy.rstrip(".").replace("`", ""))
        found.setdefault(said, []).append(framework.title)
    return "; ".join(f"{', '.join(who)}: {what}: {fix}" for (what, fix), who in found.items())


# Why a turn was not trained, and will not be.
UNTRAINED_TEXTS = {
    "long_negative": ReasonText(
        "Its rollout did no better than the others and was longer than"
        " batches.negative_max_tokens or negative_max_turns allow.",
        "Nothing, if such rollouts are rare; else let the agent give up earlier, or raise the"
        " bound.",
    ),
    "held_out": ReasonText(
        "Its rollout is for evaluation alone: it was opened as held out, or carries the tags of"
        " held-out ones (promotion.tags).",
        "",
    ),
    # The call (proxy)
    "greedy": ReasonText(
        "It was sampled at temperature 0, or so near (below 0.01) that vLLM takes another: its "
        "tokens are no sample of the policy.",
        "Give the agent a temperature above 0, best 1, or have the proxy overrule it: "
        "TRACEGRAD_PROXY_SAMPLING=free.",
    ),
    "sampling_truncated": ReasonText(
        "top_p, top_k or min_p cut off part of the distribution: the recorded log-probabilities "
        "are not the policy's own.",
        "Leave top_p, top_k and min_p out of the agent's requests, or have the proxy overrule them "
        '(sampling = "free").',
    ),
    "sampling_penalised": ReasonText(
        "A penalty or a logit bias bent the distribution that the tokens came from.",
        "Leave presence, frequency and repetition penalties and logit_bias out of the requests, or "
        'have the proxy overrule them (sampling = "free").',
    ),
    "sampling_replaced": ReasonText(
        "Beam search, a watermark or a custom logits processor (vllm_xargs, logits_processors) "
        "may have chosen its tokens in another way than the policy would.",
        "Leave use_beam_search, watermarking, vllm_xargs and logits_processors out of the "
        'requests, or have the proxy overrule them (sampling = "free").',
    ),
    "constrained": ReasonText(
        "A grammar, schema, forced or strict tool, tools one at a time, least length, forbidden "
        "word, list of tokens or thinking budget allowed the model only some of the tokens; or the "
        "engine does so by itself (engine_grammar of [proxy]).",
        f"{_framework_habits('constrained')}. Else leave response_format, guided decoding, "
        "tool_choice, parallel_tool_calls = false, min_tokens, bad_words, allowed_token_ids and "
        "thinking_token_budget out, or have the agent check the answer itself.",
    ),
    "media": ReasonText(
        "Its messages hold images, audio or video, whose tokens are not recorded.",
        "Keep them out of the conversations that training needs.",
    ),
    "echo": ReasonText(
        "The request asked for the prompt to be echoed in the answer.",
        "Leave echo out of the request.",
    ),
    # The reply (proxy)
    "aborted": ReasonText(
        "The reply was cut off before its end, or the rollout itself was aborted.",
        "Look for agents that hang up: a shorter time-out than the model needs, a killed process.",
    ),
    "no_tokens": ReasonText(
        "The server returned no token ids: there is text, and nothing to train on.",
        "Send the agent's calls through a proxy in front of vLLM (--upstream-kind vllm). What a "
        "teacher said, or other libraries' spans hold, stays text.",
    ),
    "no_prompt": ReasonText(
        "The server returned no token ids of the prompt.",
        "Serve with vLLM behind --upstream-kind vllm.",
    ),
    "no_logprobs": ReasonText(
        "The engine gave no log-probability for a sampled token.",
        "Serve with --logprobs-mode processed_logprobs.",
    ),
    "version_unknown": ReasonText(
        "Weights were pushed while it was sampled: which policy sampled which token is unknown.",
        "Nothing, if it is rare. Otherwise let pushes wait longer for calls in flight "
        "(push.drain_s).",
    ),
    "over_length": ReasonText(
        "The engine refused the prompt: it is longer than the model's context.",
        "Serve with a larger --max-model-len, or let the agent compact earlier.",
    ),
    "unacknowledged": ReasonText(
        "Its client got the answer that the store could not be written (503), and then it was: the "
        "client has no such reply, and most likely asked again.",
        "Look what kept the store from being written: a lock held for long, a full or slow disk, a "
        "server that hung.",
    ),
    "redacted": ReasonText(
        "Its tokens were dropped when its text was redacted (tracegrad redact --drop-tokens).",
        "",
    ),
    "masked": ReasonText(
        "It was imported, and its producer took its tokens, or some of them, out of the loss.",
        "Ask who made the file why.",
    ),
    # The rollout (store, ledger)
    "late": ReasonText(
        "It came in after its rollout had been leased for training.",
        "Finish a rollout only when its last call has returned.",
    ),
    "env_error": ReasonText(
        "The environment failed, not the policy: the rollout is not scored.",
        "Fix the environment and run the task again.",
    ),
    "infra_error": ReasonText(
        "The machinery failed, not the policy: the rollout is not scored.",
        "Look at the rollout's error and run the task again.",
    ),
    # The batch (trainer)
    "turn_not_selected": ReasonText(
        "Its agent, model or span is not among those that are trained.",
        "Nothing, if another agent is to learn; else batches.agents, batches.models and "
        "batches.span_paths say which are trained. A span that came after its rollout was leased "
        "says nothing of it: flush it before the rollout ends, or name the agent with the call.",
    ),
    "equal_reward": ReasonText(
        "All rollouts of its group had the same reward: nothing to learn from comparing them.",
        "Nothing, if it is some groups. If most: easier or harder tasks, larger groups, or a "
        "finer reward (batches.drop_equal_reward = false trains them all the same).",
    ),
    "stale": ReasonText(
        "Its policy version lagged too far behind the one being trained.",
        "Train more often, or let drivers wait before that: batches.stale = wait "
        "(batches.max_staleness is the bound).",
    ),
    "over_sampled": ReasonText(
        "More attempts were made at its task than the group has rollouts, and it is not one of "
        "those that were kept.",
        "Nothing: data.over_sample asks for them. data.over_sample_keep says which are kept.",
    ),
    "over_long": ReasonText(
        "It, its path or its preference pair is longer than a batch has room for.",
        "Raise batches.max_row_tokens (and tokens_per_micro_batch), or shorten the agent's "
        "context.",
    ),
    "repeated_turn": ReasonText(
        "Its rollout has the same prompt and reply, token for token, in an earlier turn.",
        "Look why the agent asks again for what it has (retries on time-outs); "
        "batches.drop_repeated = false trains repetitions too.",
    ),
    "truncated": ReasonText(
        "Its reply was cut off at its token limit, and batches.drop_truncated leaves such turns "
        "out.",
        "Let the agent ask for more tokens (max_tokens); batches.drop_truncated = false trains "
        "them as they are.",
    ),
    "foreign_token": ReasonText(
        "It holds a token that the model being trained does not know.",
        "Train the model that the engine serves, or one with the same tokenizer.",
    ),
    "rolled_back": ReasonText(
        "It was sampled by a version that a rollback gave up.",
        "Nothing: what that policy did would be learnt again. `trainer versions --decisions` says"
        " who went back, and why.",
    ),
    "drift_guard": ReasonText(
        "A guard found that what replies do had drifted, and an earlier version was to be served.",
        "`trainer versions --decisions` says which guard, and why; guards.action = pause keeps"
        " such a batch for later.",
    ),
    "predicate": ReasonText("Your own filter (batches.predicate) left it out.", ""),
    "completed": ReasonText("Its rollout completed, and batches.outcomes leaves those out.", ""),
    "agent_error": ReasonText(
        "Its rollout ended with an error of the agent, and batches.outcomes leaves those out.", ""
    ),
    "budget": ReasonText(
        "Its rollout used up its turns, tokens or time, and batches.outcomes leaves those out.",
        "",
    ),
    "unpaired": ReasonText(
        "No preference pair was made of its rollout: others of its group lie further apart.",
        "Nothing, if pairs are enough; otherwise pair all better with all worse rollouts.",
    ),
    "failed_push": ReasonText(
        "It was sampled by a version whose weights did not arrive as pushed.",
        "`trainer status` names the versions whose push failed; its log says why.",
    ),
    "non_finite": ReasonText(
        "Its log-probabilities were not finite numbers, recorded or computed again.",
        "Look for overflow: train or serve in bfloat16 or float32, not float16.",
    ),
    "non_finite_step": ReasonText(
        "The step's gradient was not finite: the step was given up with all its turns.",
        "Lower the learning rate; look for overflow (float16).",
    ),
}

# Why a turn was not trained so far.
WAITING_TEXTS = {
    "open": ReasonText(
        "Its rollout has not ended.",
        "End it; a rollout whose agent died stays open. One that nobody opened is closed by a"
        " trainer with data.idle_s.",
    ),
    "no_turns": ReasonText(
        "Its rollout ended without any recorded call: its reward is compared with nothing.",
        "Point the agent's client at the proxy, or send its spans; see docs/agents.md.",
    ),
    "no_reward": ReasonText(
        "Its rollout ended and has no reward, or it was taken back.",
        "Give one: `reward(x)` in the agent, `tracegrad score`, or POST /api/feedback; for attempts"
        " that crashed the trainer's setting rewards.agent_error.",
    ),
    "named_reward": ReasonText(
        "Its rollout ended, and has only rewards of other names, or of turns: rollouts are "
        'compared by the main one, which is named "reward" and is for the whole rollout.',
        "Give that one too: `reward(x)` without a name and a turn in the agent, or POST "
        '/api/events with neither "name" nor "turn".',
    ),
    "scoring_failed": ReasonText(
        "Its rollout ended, and a scorer failed with it: its reward is unknown.",
        "Look at the error; then `trainer score ID` tries again. A part that the reward can do"
        " without: rewards.optional.",
    ),
    "no_task": ReasonText(
        "It is ready, but its rollout has no task: training that compares the rollouts of a task"
        " (batches.group_size above 1, as by default) has nothing to compare it with.",
        'Name one where a rollout begins: @trace(task=...), rollout("task"), or `rollout_started`'
        " with `task_id` to POST /api/events. Or train without groups: batches.group_size = 1 and"
        ' objective.advantage = "running".',
    ),
    "waiting": ReasonText(
        "It is ready, and waits until enough rollouts of its task and enough groups are.", ""
    ),
    "leased": ReasonText("A trainer has it right now.", ""),
    "not_selected": ReasonText(
        "Its rollout lacks a tag that training selects by.",
        "Give rollouts these tags, or change data.tags.",
    ),
}

# Reasons that all turns of a rollout have together, but for those that have one of their own.
_OF_WHOLE_ROLLOUTS = {
    *WAITING_TEXTS,
    HELD_OUT,
    *("equal_reward", "long_negative", "unpaired", "non_finite_step"),
}

_UNKNOWN = ReasonText(
    "This version of tracegrad has no words for it.",
    "Ask whoever gave it: another version, or a filter of your own (batches.predicate).",
)


def fork_text(reason: str) -> ReasonText:
    return FORK_TEXTS.get(reason, _UNKNOWN)


def untrained_text(reason: str) -> ReasonText:
    """Of a reason why a turn was not trained, for good or so far."""
    return UNTRAINED_TEXTS.get(reason) or WAITING_TEXTS.get(reason, _UNKNOWN)


def describe_idle(row: RolloutSummary, trainer_idle_s: float | None = None) -> str | None:
    """Of a rollout that nobody opened: `closed after 60 s without a call`, or `idle for 12 s of 60
    (data.idle_s)`, as far as it is known what trainers wait for; None: somebody ends it, or did."""
    if row.idle_s is not None:
        return f"closed after {row.idle_s:g} s without a call"
    if row.opened or row.last_turn_at is None:
        return None
    idle = f"idle for {format_age(row.last_turn_at)}"
    return idle if trainer_idle_s is None else f"{idle} of {trainer_idle_s:g} s (data.idle_s)"


def waiting_text(reason: str, detail: RolloutDetail) -> ReasonText:
    """As `untrained_text`, in the words for this rollout."""
    idle = describe_idle(detail.summary, detail.trainer_idle_s)
    if reason != "open" or idle is None:
        return untrained_text(reason)
    fix = "A call puts that off." if detail.trainer_idle_s is not None else _IDLE_FIX
    return ReasonText(f"Nobody opened its rollout, and nobody has ended it: {idle}.", fix)


_IDLE_FIX = (
    "Let the trainer close such rollouts after a time without a call: --set data.idle_s=60. Or open"
    " it, and end it (docs/rollouts.md)."
)


class UntrainedReason(NamedTuple):
    """`final`: it will never be trained."""

    reason: str
    final: bool


def is_of_rollout(reason: str, detail: RolloutDetail) -> bool:
    """Whether it says something of the rollout, and not of the one turn: how it ended, how its
    group came out, what it waits for."""
    return reason in _OF_WHOLE_ROLLOUTS or reason == detail.summary.outcome


def rollout_reason(detail: RolloutDetail) -> str | None:
    """The reason that most turns have which are not trained because of their rollout, or what the
    rollout waits for if it has no turns; None: there is none."""
    if not detail.turns:
        return detail.summary.state if detail.summary.state in WAITING_TEXTS else None
    reasons = Counter(
        missing.reason
        for turn in detail.turns
        if (missing := untrained_reason(turn, detail)) and is_of_rollout(missing.reason, detail)
    )
    return reasons.most_common(1)[0][0] if reasons else None


def untrained_reason(turn: Turn, detail: RolloutDetail) -> UntrainedReason | None:
    """Why the rollout's turn is not trained; None: it is."""
    row, disposition = detail.summary, detail.dispositions.get(turn.turn_id)
    if disposition is not None:
        skipped = disposition.skip_reason
        return UntrainedReason(skipped, True) if skipped is not None else None
    if turn.untrainable is not None:
        return UntrainedReason(turn.untrainable, True)
    # The ledger closes a rollout with every turn it has: this one came after that.
    reason = LATE if row.state == "consumed" else row.state
    return UntrainedReason(reason, reason not in WAITING_TEXTS)


def describe_failed_scorings(failed: Iterable[Scoring]) -> list[str]:
    """`resolved timed out after 30 s (3 attempts)`, a line each."""
    return [f"{each.error} ({format_count(each.attempts, 'attempt')})" for each in failed]
