"""The path of a daemon's swap log. A service manager empties runtime folders, so the log is
elsewhere."""

import logging
from pathlib import Path

from swapd.shared import trusted
from swapd.shared.config import Config
from swapd.shared.runtime_dir import SWAP_LOG, Folder

log = logging.getLogger("swapd.log.place")


def place(config: Config, own: Folder) -> tuple[Path, Folder | None]:
    """The file, and its folder if that is `own`, the runtime folder. Makes the state folder.

    If it cannot make that, or others could write there, the log goes to the runtime folder, and a
    warning says so: a daemon that runs without a home is better than none.
    """
    path = config.swap_log_path
    if config.swap_log:
        return path, None
    if path.parent == own.path:
        return path, own
    try:
        with trusted.open_folder(path.parent, make=True) as folder:
            trusted.check_folder(folder, path.parent)
    except (OSError, trusted.Untrusted) as exc:
        log.warning("the swap log is in %s, not in %s: %s", own.path, path.parent, exc)
        return own.path / SWAP_LOG, own
    return path, None
