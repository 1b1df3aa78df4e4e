"""The built-in hook: secrets of well-known forms go, other text stays as it is."""

from __future__ import annotations

import json
import random
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.proxy.capture.redaction import REDACTED, secrets

# Put together here, so that nobody's scanner takes this file for a leak.
LETTERS = string.ascii_letters + string.digits


def some(length: int, alphabet: str = LETTERS) -> str:
    return "7" + "".join(random.Random(length).choices(alphabet, k=length - 1))


PEM = (
    "-----BEGIN RSA PRIVATE " + "KEY-----\n" + "\n".join([some(64)] * 3) + "\n"
    "-----END RSA PRIVATE " + "KEY-----"
)
TOKENS = [
    "AKIA" + "IOSFODNN7EXAMPLE",
    "ASIA" + "J" * 16,
    "ghp" + "_" + some(36),
    "gho" + "_" + some(36),
    "github" + "_pat_" + some(82),
    "glpat" + "-" + some(20),
    "sk" + "-" + some(48),
    "sk" + "-proj-" + some(156, LETTERS + "-_"),
    "sk" + "-ant-api03-" + some(95, LETTERS + "-_"),
    "sk" + "-or-v1-" + some(64, "0123456789abcdef"),
    "hf" + "_" + some(34),
    "npm" + "_" + some(36),
    "xoxb" + "-1234567890-" + some(24),
    "sk" + "_live_" + some(24),
    "whsec" + "_" + some(32),
    "AIza" + some(35),
    "ya29" + ".a0" + some(60),
    "tg" + "-rollout.1." + some(43),
    "eyJ" + some(20) + ".eyJ" + some(40) + "." + some(43),
    PEM,
    "-----BEGIN OPENSSH PRIVATE " + "KEY-----\n" + some(64),
    "-----BEGIN PRIVATE " + "KEY-----\n" + some(64) + "\n-----END PRIVATE " + "KEY-----",
    "-----BEGIN PGP PRIVATE " + "KEY BLOCK-----\n\n" + some(64),
]


def cleaned(text: str) -> str:
    record = secrets({"type": "turn", "request": {"messages": [{"content": text}]}})
    assert record is not None
    kept: str = record["request"]["messages"][0]["content"]
    return kept


@pytest.mark.parametrize("token", TOKENS, ids=lambda token: token[:12])
@pytest.mark.parametrize(
    "around", ["{}", "key={} ", 'export K="{}"\n', "({})", "https://h/?k={}&a=1", "\n{}\n"]
)
def test_a_secret_goes_and_what_is_around_it_stays(token: str, around: str) -> None:
    endless = token.startswith("-----BEGIN") and "-----END" not in token
    before, _, after = around.partition("{}")
    assert cleaned(around.format(token)) == before + REDACTED + ("" if endless else after)


@pytest.mark.parametrize("token", TOKENS, ids=lambda token: token[:12])
def test_a_secret_within_json_within_json_goes(token: str) -> None:
    """As in the arguments of a tool call, where a line's end is spelled as two characters."""
    arguments = json.dumps({"command": f"cat .env\n{token}\n"})
    kept = cleaned(arguments)
    assert kept.startswith('{"command": "cat .env\\n' + REDACTED)
    assert not any(line in kept for line in token.splitlines() if line)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Authorization: Bearer abcdef0123456789", f"Authorization: Bearer {REDACTED}"),
        ('{"authorization": "bearer abcdef.0123-456789"}',
         f'{{"authorization": "bearer {REDACTED}"}}'),
        ("authorization: Basic dXNlcjpwYXNzd29yZDE=", f"authorization: Basic {REDACTED}"),
        (f"aws_secret_access_key = {some(40)}", f"aws_secret_access_key = {REDACTED}"),
        (f'"SecretAccessKey": "{some(40)}"', f'"SecretAccessKey": "{REDACTED}"'),
        ("postgresql://me:hunter22@db/x", f"postgresql://me:{REDACTED}@db/x"),
    ],
)  # fmt: skip
def test_what_names_a_secret_stays(text: str, kept: str) -> None:
    assert cleaned(text) == kept


@pytest.mark.parametrize(
    "text",
    [
        "the task-force asked a risk-averse desk-research team",
        "sk-learn-pipeline-without-a-key",
        "bearer of extraordinarily-good-news",
        "basic introductory-mathematics",
        "https://example.org:8080/a@b and user@example.org",
        "AKIA is a prefix; ghp_ too, hf_model, npm_config, eyJ",
        "the PRIVATE KEY of success",
        "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----",
        "commit 3ded7ae0c9f1b2a4d5e6f708192a3b4c5d6e7f80",
        "0190b6a1-7d2c-7c1e-9a55-0242ac120002",
        "tg-rollout-1 names a rollout",
        "",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert cleaned(text) == text


def test_names_and_everything_nested_are_looked_at() -> None:
    token = TOKENS[2]
    record = {
        "type": "span",
        "name": f"GET /?key={token}",
        "attributes": {"list": [{"deep": (token, 7, None, True)}], token: "as a name"},
    }
    assert secrets(record) == {
        "type": "span",
        "name": f"GET /?key={REDACTED}",
        "attributes": {"list": [{"deep": [REDACTED, 7, None, True]}], REDACTED: "as a name"},
    }


@given(st.text())
def test_text_without_secrets_is_unharmed(text: str) -> None:
    assert cleaned(text) == text or REDACTED in cleaned(text)


@pytest.mark.parametrize(
    "unit",
    ["sk-", "sk-a", " sk-", "bearer ", "-----BEGIN A ", "-----BEGIN PRIVATE KEY-----", "eyJ",
     " eyJa.", "://a:", "tg-a.", " tg-a.", "secret_access_key ", "\\nxoxb-", "PRIVATE KEY "],
)  # fmt: skip
def test_nobodys_text_takes_long(unit: str) -> None:
    """Twice the text takes about twice the time: the quicker of two runs, of quite some text."""

    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        best = float("inf")
        for _ in range(3):
            start = time.thread_time()
            cleaned(text)
            best = min(best, time.thread_time() - start)
        return best

    # Quadratic would be 64 times as long.
    assert seconds(400_000) < 30 * seconds(50_000) + 0.05
