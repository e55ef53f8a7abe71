"""The daemons that a command needs: running ones that fit, and others that it starts.

A started daemon ends with the command, even if that crashes; a joined one is left as it is.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import swapd_client
from swapd.run import gpus
from swapd.run.child import end_with_parent
from swapd.shared import config, daemons
from swapd.shared.daemons import RunningDaemon
from swapd.shared.protocol import Status
from swapd.shared.units import size
from swapd.spawn import started, stop
from swapd_client.errors import SwapdError

#: Seconds that a running daemon may take for its status.
ASKED_S = 10.0


class DaemonSpec(NamedTuple):
    """The daemon that a command needs. `why`: the source of the budget, for people."""

    device: str
    budget: int
    why: str
    #: The chunk size with which the budget was computed; None: the daemon's default.
    chunk: int | None = None
    others: tuple[tuple[str, str], ...] = ()
    file: Path | None = None
    #: The budget of a daemon that runs already and is enough; None: as much.
    least: int | None = None

    @property
    def command(self) -> list[str]:
        settings = ["--device", self.device, "--budget", str(self.budget)]
        for name, value in self.others:
            settings += [f"--{name.replace('_', '-')}", value]
        if not self._named:
            settings += ["--runtime-dir", str(self.folder)]
        if self.chunk is not None and "chunk" not in dict(self.others):
            settings += ["--chunk", str(self.chunk)]
        return [sys.executable, "-m", "swapd", "serve", *settings]

    @property
    def folder(self) -> Path:
        return Path(self._named) if self._named else gpus.folder_of(self.device)

    @property
    def _named(self) -> str | None:
        return dict(self.others).get("runtime_dir")


class ServingDaemon(NamedTuple):
    """A daemon that serves. `process` is None if it ran before."""

    wanted: DaemonSpec
    folder: Path
    process: "subprocess.Popen[bytes] | None"

    def __str__(self) -> str:
        how = "joined" if self.process is None else f"process {self.process.pid}"
        return f"swapd on {self.wanted.device} at {self.folder} ({how})"


def joinable(wanted: DaemonSpec) -> Path | None:
    """The folder of this user's daemon that serves the device with enough budget; None if none.

    On the host, which many daemons may share, only the one in the wanted folder counts. Raises:
    SwapdError if there is one with less, or with larger chunks, as two would not fit.
    """
    for found in daemons.running():
        if (status := _status_for(wanted, found)) is None:
            continue
        end_it = f"end it with `swapd stop --endpoint {found.folder}`"
        if wanted.chunk is not None and status.chunk_bytes > wanted.chunk:
            raise SwapdError(
                f"the swapd at {found.folder} lends {wanted.device} in chunks of "
                f"{size(status.chunk_bytes)}, and {wanted.why} counts in {size(wanted.chunk)}: "
                f"{end_it}, and this run starts its own"
            )
        needed = wanted.budget if wanted.least is None else wanted.least
        if status.budget_bytes >= needed:
            return found.folder
        less = size(status.budget_bytes).replace(" ", "")
        how = f'budget = "{less}" in {wanted.file}' if wanted.file else f"--budget {less}"
        raise SwapdError(
            f"the swapd at {found.folder} has a budget of {size(status.budget_bytes)} on "
            f"{wanted.device}, and {size(needed)} is needed ({wanted.why}): {end_it}, or "
            f"give {how}"
        )
    return None


def _status_for(wanted: DaemonSpec, found: RunningDaemon) -> Status | None:
    elsewhere = wanted.device == "host" and found.folder != wanted.folder.resolve()
    if found.unreachable or elsewhere:
        return None
    try:
        with swapd_client.connect(found.folder, label="swapd run", timeout=ASKED_S) as client:
            status = client.status(timeout=ASKED_S)
    except SwapdError:
        return None  # it ends, or does not answer: no other command can use it
    theirs = gpus.name_of(status.device, gpus.listed_by(found.pid))
    same = gpus.same(gpus.name_of(wanted.device, config.listed_gpus()), theirs)
    return status if same else None


@contextmanager
def serving(wanted: Iterable[DaemonSpec], logs: Path) -> Iterator[list[ServingDaemon]]:
    """Have a daemon for each, until the block ends. `logs`: the folder of their logs.

    Blocks until all serve. Raises: SpawnError with a daemon's own error; as `joinable`.
    """
    wanted = list(wanted)
    if len(wanted) > 1:
        gpus.check_numbered([one.device for one in wanted])
    with ExitStack() as open_now:
        found = []
        for one in wanted:
            if (folder := joinable(one)) is not None:
                found.append(ServingDaemon(one, folder, None))
                continue
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / f"{one.device.replace(':', '')}.log").open("a+b") as said:
                process = started(
                    [*one.command, "--verbose"],
                    said,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the command: the daemon ends after it
                    preexec_fn=end_with_parent,
                )
            open_now.callback(stop, process)
            found.append(ServingDaemon(one, one.folder, process))
        yield found


def endpoint_of(found: Sequence[ServingDaemon]) -> str:
    """The value of `$SWAPD_ENDPOINT`: one folder, or one with the GPU's number in it."""
    if len(found) == 1:
        return str(found[0].folder)
    names = [one.wanted.folder.name for one in found]
    numbered = {
        str(one.folder).replace(name, "cuda{gpu}") for one, name in zip(found, names, strict=True)
    }
    if len(numbered) > 1:
        raise SwapdError(
            "the daemons of these GPUs are in folders whose names have no pattern, by which a "
            f"worker finds its own: {', '.join(str(one.folder) for one in found)}: end those that "
            "were there with `swapd stop`"
        )
    return numbered.pop()
