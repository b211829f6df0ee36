"""Push a model folder with its card to a model hub, with the user's own token."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from requests import RequestException

from shared.errors import UserError

TOKEN = "HF_TOKEN"


def check_target(repo: str | None) -> str:
    """The repository to push to; raises UserError without a name or a token, before anything is made."""
    if not repo or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"--to hub needs the repository as --repo OWNER/NAME, and it is {repo!r}; name it.")
    if not os.environ.get(TOKEN):
        raise UserError(f"A push to a hub needs your token in {TOKEN}, which is not set; make one with write access.")
    return repo


def push(model: Path, card: str, repo: str, *, public: bool) -> str:
    """Upload the folder `model` and its card in one commit; returns the commit's address.

    A repository that does not exist is made, private unless `public`. Raises UserError when the hub refuses.
    """
    api = HfApi(token=os.environ[TOKEN])
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        files = [file for file in sorted(model.iterdir()) if file.is_file() and file.name != "README.md"]
        added = [CommitOperationAdd(file.name, file) for file in files]
        added.append(CommitOperationAdd("README.md", card.encode()))
        return str(api.create_commit(repo, added, commit_message="Trained model and its card").commit_url)
    except (HfHubHTTPError, RequestException, ValueError) as error:
        raise UserError(
            f"The hub did not take {repo} ({' '.join(str(error).split())[:300]}); check the token's rights and the "
            "name, then give the command again."
        ) from error
