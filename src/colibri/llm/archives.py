"""Where the conversations of a model are kept on disk, and which of them it may read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from colibri import __version__
from colibri.engine.archive import Archive
from colibri.errors import SettingsError
from colibri.kv import StoredStates
from colibri.llm.heat_keeper import model_identity
from colibri.llm.loading import Prepared
from colibri.models.model import Model

_ABOUT = "about.txt"
_log = logging.getLogger("colibri")


def open_archive(prepared: Prepared, model: Model, note: Callable[[str], None]) -> Archive | None:
    """The archive that the settings ask for, of this model under these settings alone.

    Each model, and each set of settings that changes a bit of the state, has a folder of its own.
    Others in the directory are left aside, which is said where this one has none yet.

    Raises:
        SettingsError: the directory cannot be used.
    """
    if prepared.settings.session_dir is None:
        return None
    directory = Path(prepared.settings.session_dir)
    about = state_identity(prepared)
    name = hashlib.blake2b(about.encode(), digest_size=8).hexdigest()
    folder = directory / name
    try:
        others = [path for path in directory.glob(f"*/{_ABOUT}") if path.parent != folder]
        if others and not folder.exists():
            _log.warning(
                "%s holds conversations of other models or settings (%s): they are left aside",
                directory,
                others[0].read_text(encoding="utf-8").strip(),
            )
        states = StoredStates(folder, model.kv.num_cells > 0, prepared.settings.session_disk)
        (folder / _ABOUT).write_text(about + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"session_dir is {directory}: {error.strerror}: name a directory that can be written"
        ) from None
    return Archive(states, note)


def state_identity(prepared: Prepared) -> str:
    """All that the bits of state and logits depend on, beside the ids.

    Two models whose files are of equal sizes are told apart by when these were written.
    """
    kernels, plan, description = prepared.kernels, prepared.plan, prepared.description
    files = {tensor.spec.file for tensor in description.dense} | set(description.experts.files)
    times = sorted((path.name, path.stat().st_mtime_ns) for path in files)
    written = hashlib.blake2b(repr(times).encode(), digest_size=8).hexdigest()
    rounded = "".join(f" {k}={v}" for k, v in sorted(description.rounded.items()))
    return (
        f"{model_identity(description)} written={written} kv={plan.kv_format} "
        f"activations={kernels.activations} kernels={kernels.name}{rounded} version={__version__}"
    )
