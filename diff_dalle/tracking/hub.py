"""Files in a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from typing import Any

from .. import storage
from ..errors import Fault, InputError, named
from ..storage.failures import is_temporary, reason_of
from ..storage.hub import hub_api, server
from .tracker import import_extra

MAX_TOKEN = 4096  # bytes of a file with a token
_REPO = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


def check_repo(repo: str) -> None:
    """InputError unless ``repo`` can be the name of a repository."""
    if not _REPO.fullmatch(repo) or len(repo) > 96:
        raise InputError(Fault("huggingface_repo", "must be the name of a repository, such as user/name", repo))


class Hub:
    """A repository, private when it is made here. HF_ENDPOINT selects another server.

    token_path: a file with a token; None = the one that ``hf auth login`` or HF_TOKEN has set.

    Raises InputError when the hub refuses; while it is away, it is asked again by each ``put``.
    """

    def __init__(self, repo: str, token_path: str | None):
        self.repo, self.made = repo, False
        hub = import_extra("huggingface_hub", "hub", "save_to huggingface")
        import_extra("huggingface_hub.utils", "hub", "save_to huggingface").disable_progress_bars()
        token = storage.read_text(token_path, MAX_TOKEN).strip() if token_path else hub.get_token()
        if not token:
            remedy = f"run `hf auth login`, or name a file with a token by {named('token_path')}"
            raise InputError(Fault("huggingface_repo", f"{repo} needs a login: {remedy}"))
        self.server, self.token = server(), token
        try:
            self._make()
        except Exception as error:
            if not is_temporary(error):
                remedy = "check its name, and that the token may write there"
                rule = f"{repo} cannot be used ({reason_of(error)}): {remedy}"
                raise InputError(Fault("huggingface_repo", rule)) from error

    def _make(self) -> Any:
        """The client, with which the repository has been made."""
        api = hub_api(self.token)
        if not self.made:
            api.create_repo(self.repo, private=True, exist_ok=True)
            self.made = True
        return api

    def put(self, path: str, name: str) -> None:
        """Commit the local file ``path`` as ``name``."""
        self._make().upload_file(
            path_or_fileobj=path, path_in_repo=name, repo_id=self.repo, commit_message=f"diff_dalle: {name}"
        )
