"""Where the swap log of a daemon lies. A service manager empties runtime folders; this stays."""

import logging
from pathlib import Path

from swapd.shared import trusted
from swapd.shared.config import Config
from swapd.shared.runtime_dir import SWAP_LOG, Folder

log = logging.getLogger("swapd.log.place")


def place(config: Config, own: Folder) -> tuple[Path, Folder | None]:
    """The file, and its folder if that is `own`, the runtime folder. Makes the state folder.

    If that cannot be made, or others could write there, the log lies in the runtime folder, and a
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
        log.warning("the swap log lies in %s, for it cannot in %s: %s", own.path, path.parent, exc)
        return own.path / SWAP_LOG, own
    return path, None
