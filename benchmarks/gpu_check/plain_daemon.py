"""`swapd serve` without uvloop, typer and rich: the same daemon on asyncio's own loop.

Takes the same flags, but only as `--name value`.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence

from swapd.daemon.daemon import Daemon
from swapd.device import open_device
from swapd.shared import runtime_dir
from swapd.shared.config import load


def main(arguments: Sequence[str]) -> None:
    flags = zip(arguments[::2], arguments[1::2], strict=True)
    logging.basicConfig(level=logging.WARNING)
    config = load(None, {flag[2:].replace("-", "_"): value for flag, value in flags})
    with runtime_dir.claim(config.folder) as folder:
        device = open_device(
            config.device, config.budget, config.chunk_bytes, config.bandwidth, config.pin_limit
        )
        try:
            daemon = Daemon(config, device, folder)
            asyncio.run(daemon.run(lambda: _say(str(config.folder))))
        finally:
            device.close()


def _say(folder: str) -> None:
    sys.stdout.write(f"serving {folder}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
