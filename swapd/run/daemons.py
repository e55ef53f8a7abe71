"""The daemons that a command needs: running ones that fit, and others that it starts.

A started daemon ends with the command, even if the command crashes; a joined daemon is left as it
is.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import swapd_client
from swapd.run import gpus
from swapd.shared import config, daemons
from swapd.shared.daemons import RunningDaemon
from swapd.shared.protocol import Status
from swapd.shared.units import size
from swapd.spawn import SpawnError, end_with_parent, started, stop
from swapd_client.errors import SwapdError

ASKED_S = 10.0


class DaemonSpec(NamedTuple):
    """`why`: the source of the budget, for people."""

    device: str
    budget: int
    why: str
    #: The chunk size for which the budget was computed; None: the default.
    chunk: int | None = None
    others: tuple[tuple[str, str], ...] = ()
    file: Path | None = None
    #: The least budget of a running daemon to join; None: `budget`.
    least: int | None = None

    @property
    def command(self) -> list[str]:
        settings = ["--device", self.device, "--budget", str(self.budget)]
        for name, value in self.others:
            settings += [config.flag(name), value]
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
    """`process` is None if the daemon was joined."""

    wanted: DaemonSpec
    folder: Path
    budget: int
    process: "subprocess.Popen[bytes] | None"

    def __str__(self) -> str:
        how = "joined" if self.process is None else f"process {self.process.pid}"
        return f"swapd on {self.wanted.device} at {self.folder} ({how})"


def joinable(wanted: DaemonSpec) -> ServingDaemon | None:
    """Return this user's daemon on that device, if its budget is enough, or None.

    On the host, which many daemons may share, only the daemon in the wanted folder counts. Raises:
    SwapdError if a daemon there has less, or larger chunks: two would not fit.
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
            return ServingDaemon(wanted, found.folder, status.budget_bytes, None)
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
        with swapd_client.connect(
            found.folder, label="swapd run", timeout=ASKED_S, reconnect=0
        ) as client:
            status = client.status(timeout=ASKED_S)
    except SwapdError:
        return None  # the daemon is ending, or does not answer: no command can use it
    theirs = gpus.name_of(status.device, gpus.listed_by(found.pid))
    same = gpus.same(gpus.name_of(wanted.device, config.listed_gpus()), theirs)
    return status if same else None


@contextmanager
def serving(wanted: Iterable[DaemonSpec], logs: Path) -> Iterator[list[ServingDaemon]]:
    """Join or start a daemon for each spec, until the block ends. `logs`: folder for their logs.

    Blocks until all serve. Raises: SpawnError with a daemon's own error; ConfigError; SwapdError as
    in `joinable`.
    """
    wanted = list(wanted)
    if len(wanted) > 1:
        gpus.check_numbered([one.device for one in wanted])
    environment = config.environment_of_a_daemon()
    # it is for daemons that clients start: between two commands this one would end
    environment.pop(config.LINGER_VARIABLE, None)
    with ExitStack() as open_now:
        found = []
        for one in wanted:
            if (there := joinable(one)) is not None:
                found.append(there)
                continue
            with _log(logs / f"{one.device.replace(':', '')}.log") as said:
                process = started(
                    [*one.command, "--verbose"],
                    said,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the command: the daemon ends after it
                    preexec_fn=end_with_parent,
                )
            open_now.callback(stop, process)
            found.append(ServingDaemon(one, one.folder, one.budget, process))
        yield found


def _log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+b")
    except OSError as exc:
        why = f"{path} is not written: {exc.strerror}; $XDG_STATE_HOME names another place"
        raise SpawnError(why) from exc


def endpoint_of(found: Sequence[ServingDaemon]) -> str:
    """Return `$SWAPD_ENDPOINT`: one folder, or a pattern with the GPU's number. Raises:
    SwapdError."""
    if len(found) == 1:
        return str(found[0].folder)
    names = [one.wanted.folder.name for one in found]
    numbered = {
        str(one.folder.with_name(one.folder.name.replace(name, "cuda{gpu}")))
        for one, name in zip(found, names, strict=True)
    }
    if len(numbered) > 1:
        raise SwapdError(
            "the daemons of these GPUs are in folders whose names have no pattern, by which a "
            f"worker finds its own: {', '.join(str(one.folder) for one in found)}: end those that "
            "were there with `swapd stop`"
        )
    return numbered.pop()
