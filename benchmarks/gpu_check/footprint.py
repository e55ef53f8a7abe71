"""Open descriptors and memory of a process. Stdlib only."""

import os
from pathlib import Path


def footprint(pid: int) -> dict[str, int]:
    """Descriptors and resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    resident = int(fields["VmRSS"].split()[0]) * 1024
    return {"fds": len(os.listdir(f"/proc/{pid}/fd")), "rss": resident}
