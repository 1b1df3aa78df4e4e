"""Names of models: folders, and snapshots of a Hub on loopback or of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

from support.chat.fake_hub import FakeHub, put_in_cache
from tracegrad.chat.model_folder import (
    HubName,
    ModelNotFound,
    commit_of_snapshot,
    find_model_folder,
)

NAME = "acme/tiny-1.5B"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Nobody listens there.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "w.safetensors"):
        (folder / name).write_text(f'{{"is": "{name}"}}')
    (folder / "pytorch_model.bin").write_text("the same weights again")
    return folder


@pytest.fixture
def hub(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    served = FakeHub(NAME, model, OLD)
    with served.serving() as url:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served
        close_session()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", None)),
        ("gpt2", HubName("gpt2", None)),
        ("acme/x@v1.0", HubName("acme/x", "v1.0")),
        ("acme/x@refs/pr/1", HubName("acme/x", "refs/pr/1")),
        ("/data/models/x", None),
        ("./x", None),
        ("../x/y", None),
        ("~/x", None),
        ("a/b/c", None),
        ("acme/", None),
        ("", None),
    ],
)
def test_what_may_be_a_name_of_the_hub(name: str, found: HubName | None) -> None:
    assert HubName.parse(name) == found


def test_a_folder_goes_before_the_hub(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme" / "tiny-1.5B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model_folder(NAME) == Path(NAME)


def test_a_model_is_fetched_once_and_pinned(hub: FakeHub, cache: Path) -> None:
    first = find_model_folder(NAME)
    names = {file.name for file in first.iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json", "w.safetensors"}
    assert (first / "w.safetensors").read_text() == '{"is": "w.safetensors"}'
    assert commit_of_snapshot(first, NAME) == OLD

    hub.commit = NEW  # its authors put another one there
    hub.requests.clear()
    assert find_model_folder(NAME, pinned_by=first) == first
    assert not any("/resolve/" in path for path in hub.requests), "nothing is fetched again"
    assert commit_of_snapshot(find_model_folder(NAME), NAME) == NEW
    # Another model's snapshot, or a plain folder, pins nothing; a named revision goes first.
    other = first.parents[2] / "models--acme--other" / "snapshots" / OLD
    for pin in (other, cache):
        assert commit_of_snapshot(find_model_folder(NAME, pinned_by=pin), NAME) == NEW
    named = find_model_folder(f"{NAME}@{NEW}", pinned_by=first)
    assert commit_of_snapshot(named, NAME) == NEW


def test_of_a_tokenizer_no_weights_are_fetched(hub: FakeHub, cache: Path) -> None:
    folder = find_model_folder(NAME, weights=False)
    assert "tokenizer.json" in {file.name for file in folder.iterdir()}
    assert not [path for path in hub.requests if "safetensors" in path]


def test_a_cached_model_needs_no_network(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_in_cache(cache, NAME, model, OLD)
    assert find_model_folder(NAME) == snapshot, "the hub does not answer"
    assert find_model_folder(NAME, fetch=False) == snapshot
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_model_folder(NAME) == snapshot
    with pytest.raises(ModelNotFound, match=r"HF_HUB_OFFLINE forbids .* --revision v2$"):
        find_model_folder(f"{NAME}@v2")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "has no public model of this name; check it"),
        (403, "give access on request: ask at http://127.0.0.1:"),
        (404, "it has no commit, tag or branch 'v9'; name one behind the @"),
        (500, "cannot be reached; check the network, or give a folder"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(status: int, said: str, hub: FakeHub) -> None:
    hub.status = status
    with pytest.raises(ModelNotFound) as error:
        find_model_folder(f"{NAME}@v9")
    assert str(error.value).startswith(f"{NAME}: no such folder, and not to be had from the ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_network_the_line_says_so(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"127\.0\.0\.1:9 cannot be reached"):
        find_model_folder(NAME)
    with pytest.raises(ModelNotFound, match=rf"it is not in the cache {cache}$"):
        find_model_folder(NAME, fetch=False)
    with pytest.raises(ModelNotFound, match=r"^/no/such: there is no such folder; give one, or"):
        find_model_folder("/no/such")
