"""A recorded swap log, run again under other settings: in seconds, by the same core.

`work.py` reads from a log who asked for what, and how long after what. `again.py` runs that on a
device without bytes or a clock, around the real core. `optimum.py` says how few bytes any choice of
evictions would have loaded, and `search.py` looks for better settings. None does I/O; `swapd
replay` and `swapd plan --from-log` print the results.
"""

from swapd.replay.again import run_again
from swapd.replay.optimum import fewest_of
from swapd.replay.work import RecordedWork, ReplayTally, read_work

__all__ = ["RecordedWork", "ReplayTally", "fewest_of", "read_work", "run_again"]
