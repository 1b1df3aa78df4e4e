"""Where a model lies: a folder of this machine, or a snapshot of a repository of the Hugging Face
Hub (`Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION` for a commit, tag or branch).

Snapshots lie in the Hub's cache and are fetched into it by huggingface_hub, with its settings:
HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_HUB_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*(?:/[\w.-]*\w)?)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII
)
# All that `chat.model.load_chat_format` reads.
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_MODEL_FILES = (*_TEXT_FILES, "*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
# The same weights in other formats.
_OTHER_FORMATS = ("original/*", "onnx/*", "consolidated*")


class ModelNotFound(ValueError):
    """Why there is no such model, and what to do about it; one line."""


class HubName(NamedTuple):
    repository: str
    revision: str | None

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        found = _HUB_NAME.fullmatch(name)
        return found and cls(found["repository"], found["revision"])


def find_model_folder(
    name: str, *, weights: bool = True, pinned_by: Path | None = None, fetch: bool = True
) -> Path:
    """The folder `name`, if there is one, or else the snapshot of the Hub's repository `name`.

    Args:
        weights: False: tokenizer, chat template and config are enough.
        pinned_by: a snapshot that was used before. If it is of the same repository, and `name` has
            no revision, its commit is taken again, whatever the repository's newest is by now.
        fetch: False: only what is in the cache.

    Raises:
        ModelNotFound: there is no such folder, and no such snapshot can be had.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    if (hub := HubName.parse(name)) is None:
        raise ModelNotFound(
            f"{name}: there is no such folder; give one, or the name of a model on the Hugging Face"
            " Hub, like Qwen/Qwen3-0.6B"
        )
    revision = hub.revision
    if revision is None and pinned_by is not None:
        revision = commit_of_snapshot(pinned_by, hub.repository)
    return _snapshot(hub.repository, revision, weights=weights, fetch=fetch)


def commit_of_snapshot(folder: Path, repository: str) -> str | None:
    """The commit that a snapshot folder is of; None: it is no snapshot of that repository."""
    of = f"models--{repository.replace('/', '--')}"  # the Hub's cache is laid out so
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name == of
    return folder.name if is_snapshot else None


def _snapshot(repository: str, revision: str | None, *, weights: bool, fetch: bool) -> Path:
    # Half a second of imports that a folder does not need.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(_MODEL_FILES if weights else _TEXT_FILES),
                ignore_patterns=list(_OTHER_FORMATS),
                local_files_only=not fetch,
            )
        )
    # Its own kinds, the HTTP library's, which is another one in each major version, and OSError.
    except Exception as error:
        raise explained(repository, revision, error, fetch=fetch) from error


def explained(
    repository: str, revision: str | None, error: Exception, *, fetch: bool = True
) -> ModelNotFound:
    """`error`: of huggingface_hub's, whatever it was asked."""
    return ModelNotFound(
        f"{repository}: no such folder, and not to be had from the Hugging Face Hub:"
        f" {_reason(repository, revision, error, fetch=fetch)}"
    )


def _reason(repository: str, revision: str | None, error: Exception, *, fetch: bool) -> str:
    from huggingface_hub import constants, errors

    where, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    once = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    match error:
        case errors.GatedRepoError():
            return (
                f"its authors give access on request: ask at {where}/{repository}, then set"
                " HF_TOKEN or run hf auth login"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{where} has no public model of this name; check it, and for a private one set"
                " HF_TOKEN or run hf auth login"
            )
        case errors.RevisionNotFoundError():
            return f"it has no commit, tag or branch {revision!r}; name one behind the @"
        case errors.LocalEntryNotFoundError() if constants.is_offline_mode():
            return (
                f"it is not, or not in full, in the cache {cache}, and HF_HUB_OFFLINE forbids to"
                f" fetch it; unset that, or run where there is a network: {once}"
            )
        case errors.LocalEntryNotFoundError() if not fetch:
            return f"it is not in the cache {cache}"
        case errors.LocalEntryNotFoundError():
            return (
                f"it is not, or not in full, in the cache {cache}, and {where} cannot be reached;"
                " check the network, or give a folder"
            )
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
