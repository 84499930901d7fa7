"""The name of a model as a directory of files: a local path, or an id on the Hugging Face hub.

Knows nothing of what the files hold. The hub's client is imported only when an id has to be looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backend.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED_FILES = ["*.json", "*.safetensors", "*.txt"]


def resolve(
    path_or_hub_id: str | Path, revision: str | None = None, offline: bool = False, progress: bool = False
) -> Path:
    """The directory that holds the model's files.

    A local directory is taken as it is. Otherwise the name is a hub id (`owner/name`), of which
    `revision` (a commit, tag or branch; by default the main branch) is downloaded into the hub's cache,
    or with `offline` only looked up there; `progress` shows a bar. Raises `CheckpointError` if there
    is neither, saying what to do.
    """
    name = str(path_or_hub_id)
    directory = Path(name).expanduser()
    if name and directory.is_dir():
        return directory
    if directory.is_file():
        raise CheckpointError(f"{name} is a file; a checkpoint is the directory that holds config.json")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name!r} is neither a directory nor a hub id (owner/name)")
    return _download(name, revision, offline, progress)


def _download(hub_id: str, revision: str | None, offline: bool, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        with _progress_bars(progress):
            found = snapshot_download(hub_id, revision=revision, local_files_only=offline, allow_patterns=WANTED_FILES)
    except GatedRepoError as error:
        raise CheckpointError(f"{wanted} asks for consent: accept its terms on the hub, set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"there is no directory and no model {hub_id} on the hub") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{hub_id} has no revision {revision}") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(_not_cached(wanted, hub_id, revision, offline)) from error
    except OSError as error:
        raise CheckpointError(f"{wanted} could not be downloaded: {error}") from error
    return Path(found)


def _not_cached(wanted: str, hub_id: str, revision: str | None, offline: bool) -> str:
    why = "offline" if offline else "the hub cannot be reached"
    command = f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")
    return f"{wanted} is not in the local cache and {why}: run `{command}` with a connection first"


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not shown and not before:
            enable_progress_bars()
