"""Directories in Hugging Face's layout, and hub ids."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from pegboard.core.interfaces.errors import ModelError, Temporary
from pegboard.core.interfaces.model_source import ModelSourceContext
from pegboard.plugins.model_sources.base import DirectorySource
from pegboard.plugins.model_sources.options import HFOptions

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w-]*")
_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "additional_chat_templates/*")
"""What is fetched: never pickles, never code."""


class HFSource(DirectorySource[HFOptions]):
    """`model.path` is a directory with config.json, safetensors and tokenizer.json, or a hub id like "org/name"."""

    @classmethod
    def supports(cls, options: HFOptions, ctx: ModelSourceContext) -> str | None:
        """Return None for an existing directory and for what reads like a hub id."""
        reference = ctx.reference
        if reference and Path(reference).expanduser().is_dir():
            return None
        if reference.lower().endswith(".gguf"):
            return "a GGUF file is not a directory"
        if Path(reference).expanduser().is_file():
            return f"{reference!r} is a file, and not a directory"
        if _HUB_ID.fullmatch(reference):
            return None
        return f"there is no directory {reference!r}{_similar(Path(reference))}, and it is not a hub id (org/name)"

    def check(self) -> bool:
        local = Path(self.ctx.reference).expanduser()
        if local.is_dir():
            self._checked(local)
        return local.is_dir()

    def locate(self) -> Path:
        local = Path(self.ctx.reference).expanduser()
        return self._checked(local if local.is_dir() else self._fetch())

    def _checked(self, directory: Path) -> Path:
        """Return the directory. Raises ModelError where it lacks files of a model."""
        for name in ("config.json", "tokenizer.json"):
            if not (directory / name).is_file():
                raise ModelError(f"model.path: {directory} has no {name}, so it is not in Hugging Face's layout")
        if self.options.needs_weights and not any(directory.glob("*.safetensors")):
            raise ModelError(
                f"model.path: {directory} has no *.safetensors; pickled weights are never read. Convert them with "
                f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        return directory

    def _fetch(self) -> Path:
        """Return the hub's snapshot: from the local cache where it is whole, else downloaded."""
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        reference, revision = self.ctx.reference, self.options.revision
        offline = self.options.offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        try:
            found = huggingface_hub.snapshot_download(
                reference,
                revision=revision,
                allow_patterns=list(_FILES),
                ignore_patterns=["consolidated*"],  # Mistral's second copy of the same weights
                local_files_only=offline,
            )
        except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
            kind = ModelError if offline or _reads_like_a_path(reference) else Temporary
            raise kind(self._unreachable(offline)) from error
        except (HfHubHTTPError, HFValidationError) as error:
            raise ModelError(f"model.path: the hub refused {reference!r}: {error}") from error
        except OSError as error:
            raise ModelError(
                f"model.path: {reference!r} cannot be fetched into the hub's cache: {error}. Set HF_HOME to a folder "
                f"with free space that this user may write"
            ) from error
        return Path(found)

    def _unreachable(self, offline: bool) -> str:
        reference = self.ctx.reference
        why = "offline mode is on" if offline else "the model hub cannot be reached"
        return (
            f"model.path: {reference!r} is not a directory here{_similar(Path(reference))} and not in the hub's local "
            f"cache, and {why}. Give the path of a local directory, fetch the model where there is a network (hf "
            f"download {reference}) and copy the cache (HF_HOME), or try the demo model: demo:smollm2-135m-instruct"
        )


def _reads_like_a_path(reference: str) -> bool:
    """Return whether a reference may be a mistyped path rather than a hub id: no other start mends that."""
    parent = Path(reference).parent
    return (parent != Path() and parent.is_dir()) or bool(_similar(Path(reference)))


def _similar(missing: Path) -> str:
    """Return the directories beside a missing one that have a similar name, for a message; "" where none has."""
    try:
        names = [path.name for path in missing.expanduser().parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(missing.name, names)
    return f" (did you mean {' or '.join(repr(str(missing.parent / name)) for name in found)}?)" if found else ""
