"""The daemon's settings: declared once, here. This module has their only defaults, and is the only
one that reads the environment.

A setting comes from its flag, else `SWAPD_<NAME>`, else the TOML file, else its default.
An unknown setting is an error that names it. An unknown variable is only a warning, because other
software may have set it.
"""

import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from swapd.shared import documents
from swapd.shared.errors import UserError
from swapd.shared.runtime_dir import SWAP_LOG
from swapd.shared.text import meant
from swapd.shared.units import Size, parse_rate, parse_span, size, typed_size

log = logging.getLogger("swapd.shared.config")

#: The client's variable for the daemon's folder, and the daemon's for its file.
ENDPOINT_VARIABLE = "SWAPD_ENDPOINT"
CONFIG_VARIABLE = "SWAPD_CONFIG"
#: The GPUs that CUDA shows to a process.
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
#: The secret for the daemon's page: not a setting, because command lines are public.
HTTP_TOKEN_VARIABLE = "SWAPD_HTTP_TOKEN"
#: The stage of `swapd run FILE` that a process belongs to.
STAGE_VARIABLE = "SWAPD_STAGE"
#: Whether clients do without swapd, and on which device then, as the daemon's variable says.
DISABLE_VARIABLE = "SWAPD_DISABLE"
DEVICE_VARIABLE = "SWAPD_DEVICE"
#: The socket on which systemd listens for the daemon's state.
NOTIFY_VARIABLE = "NOTIFY_SOCKET"
#: How many descriptors systemd holds for the daemon, since version 254.
STORE_VARIABLE = "FDSTORE"
#: How long clients wait for the next daemon, and that by default.
RECONNECT_VARIABLE = "SWAPD_RECONNECT"
RECONNECT = "30s"
_NO_SETTINGS = frozenset(
    (ENDPOINT_VARIABLE, CONFIG_VARIABLE, HTTP_TOKEN_VARIABLE, STAGE_VARIABLE, RECONNECT_VARIABLE)
)

#: Names of devices; group 1 is a GPU's index. "cuda0" is for systemd, where a colon in the name of
#: a folder has another meaning.
DEVICE_NAME = re.compile(r"host|cuda(?::?([0-9]+))?")

#: Under `chunk = "auto"`, a GPU's budget over LARGE_BUDGET has chunks of LARGE_CHUNK: evicting a
#: component of some GiB then takes a quarter of the driver calls, and the last chunk wastes little.
#: This is the default under strict isolation only, where acquires wait for these calls; elsewhere
#: only the waste would be noticed.
LARGE_BUDGET = 8 << 30
LARGE_CHUNK = 256 << 20
GPU_CHUNK = 64 << 20
#: Below it a GPU's chunks are as small as the host device's: those of 64 MiB would waste much.
SMALL_BUDGET = 1 << 30
HOST_CHUNK = 2 << 20

#: Kubernetes sets SWAPD_PORT to the address of a service called swapd.
_SERVICE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
#: The driver of NVIDIA has a file there for each GPU: nvidia0, nvidia1.
_DEVICES = Path("/dev")
#: The longest path.
_TEXT_MAX_CHARS = 4096


class ConfigError(UserError):
    """A setting is unknown or invalid. The message names it and its valid values."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of `swapd serve`, in bytes and seconds unless noted otherwise."""

    device: Annotated[
        str,
        Meta(
            description="What to swap onto: host, or a GPU, as in cuda:0; default: a GPU if it "
            "has one"
        ),
    ] = "host"
    budget: Annotated[int, Meta(description="Device memory to own, as in 40GiB", gt=0)] = 1 << 30
    chunk: Annotated[
        Annotated[int, Meta(gt=0)] | Literal["auto"] | None,
        Meta(
            description="Unit of memory and mapping, a multiple of 2MiB; default: 2MiB on the "
            "host, 64MiB on a GPU, as auto under strict isolation; auto: 256MiB on a GPU if the "
            "budget is over 8GiB"
        ),
    ] = None
    bandwidth: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Slow copies down to this, as in 12GB/s (host only)"),
    ] = None
    host_memory: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(description="Most host memory for host copies; default: the available memory"),
    ] = None
    keep_host: Annotated[
        int,
        Meta(
            description="Host memory for the weights of files that no session uses: the next "
            "`client.load` of the same files takes them as they are, and so does a vLLM stage "
            "that starts again",
            ge=0,
        ),
    ] = 0
    pin_limit: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Most host memory to pin for a GPU's copies; default: all host copies"),
    ] = None
    runtime_dir: Annotated[
        str | None, Meta(description="Folder of sockets and lock; default: one for each device")
    ] = None
    isolation: Annotated[
        Literal["relaxed", "strict"],
        Meta(description="strict: reuse memory only when its worker has unmapped it"),
    ] = "relaxed"
    ack_timeout: Annotated[
        float,
        Meta(description="Seconds a worker that runs has to unmap before it is fenced", gt=0),
    ] = 60.0
    residency_factor: Annotated[
        float, Meta(description="A busy component stays this many times its swap-in time", ge=0)
    ] = 8.0
    residency_bound: Annotated[float, Meta(description="and at most so many seconds", ge=0)] = 2.0
    patience: Annotated[
        float, Meta(description="Seconds after which a waiter goes first, any priority", gt=0)
    ] = 30.0
    eviction: Annotated[
        Literal["next_use", "lru"],
        Meta(description="next_use: first what is needed last, by the order of uses so far"),
    ] = "next_use"
    overtake: Annotated[
        int,
        Meta(
            description="So many later acquires of what is in go before the first that waits", ge=0
        ),
    ] = 16
    turn: Annotated[float, Meta(description="and for so many seconds at most", gt=0)] = 600.0
    stop_timeout: Annotated[
        float, Meta(description="Seconds to wait for leases when told to stop", ge=0)
    ] = 10.0
    linger: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Stop after so many seconds without a session, 10 at least before the "
            "first; default: never"
        ),
    ] = None
    swap_log: Annotated[
        str | None,
        Meta(
            description="Swap log file; default: swap-log.jsonl in $STATE_DIRECTORY, else in "
            "--runtime-dir if that is set, else in ~/.local/state/swapd/DEVICE"
        ),
    ] = None
    swap_log_size: Annotated[
        int, Meta(description="Rotate the swap log at this size; one old file is kept", gt=0)
    ] = 64 << 20
    swap_log_age: Annotated[
        float, Meta(description="and when its first record is so old, as in 12h or 7d", gt=0)
    ] = 7 * 86400.0
    http: Annotated[
        str | None,
        Meta(description="Serve a page and /metrics there, as in 127.0.0.1:9470; default: nowhere"),
    ] = None
    http_token_file: Annotated[
        str | None,
        Meta(
            description="File with the token of the page, else $SWAPD_HTTP_TOKEN; not needed on "
            "the loopback"
        ),
    ] = None

    @property
    def chunk_bytes(self) -> int:
        """The chunk as set, or the device's default: on a GPU each mapping costs time."""
        if isinstance(self.chunk, int):
            return int(self.chunk)
        auto = self.chunk == "auto" or self.isolation == "strict"
        return HOST_CHUNK if self.device == "host" else gpu_chunk(self.budget, large=auto)

    @property
    def folder(self) -> Path:
        """Absolute, because clients have other working directories."""
        folder = Path(self.runtime_dir) if self.runtime_dir else default_folder(self.device)
        return folder.absolute()

    @property
    def swap_log_path(self) -> Path:
        if self.swap_log:
            return Path(self.swap_log).absolute()
        if managed := os.environ.get("STATE_DIRECTORY"):  # noqa: TID251
            return Path(managed.partition(":")[0]).absolute() / SWAP_LOG
        named = self.folder if self.runtime_dir else state_folder() / _folder_name(self.device)
        return named / SWAP_LOG


def gpu_chunk(budget: int, *, large: bool) -> int:
    """The chunk of a GPU's daemon where none is set. `large`: it may be a large one."""
    if budget < SMALL_BUDGET:
        return HOST_CHUNK
    return LARGE_CHUNK if large and budget > LARGE_BUDGET else GPU_CHUNK


_KINDS = get_type_hints(Config, include_extras=True)


def load(
    path: Path | None,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Callable[[], Any]] = {},
) -> Config:
    """Read the settings; `flags` has only the flags that were given. `defaults`: how to choose what
    nothing names, in place of the defaults of `Config`.

    Ignores unknown variables, with a warning in the log. Raises: ConfigError, naming the setting
    and its source.
    """
    environ = os.environ if environ is None else environ  # noqa: TID251
    if path is None and (named := _unless_service(environ.get(CONFIG_VARIABLE))):
        path = Path(named)
    merged = {
        **(parsed(read_toml(path), f"{path}: ") if path else {}),
        **_from_environment(environ),
        **{name: _parse(name, value, _flag(name)) for name, value in flags.items()},
    }
    chosen = {name: choose() for name, choose in defaults.items() if name not in merged}
    return Config(**merged, **chosen)


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises: ConfigError if it is unreadable or not TOML."""
    try:
        return tomllib.loads(documents.read(path))
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # not TOML, or not text
        raise ConfigError(f"{path}: {exc}") from exc


def parsed(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings of a file's table. Errors put `source` before their names.

    Raises: ConfigError.
    """
    return {name: _parse(name, value, f"{source}{name}") for name, value in raw.items()}


def default_folder(device: str) -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")  # noqa: TID251
    root = Path(base) / "swapd" if base else Path(f"/tmp/swapd-{os.getuid()}")
    return root / _folder_name(device)


def logs_left_by(folder: Path) -> list[Path]:
    """The swap logs that a daemon with this runtime folder may have left."""
    by_default = state_folder() / folder.name if folder == default_folder(folder.name) else folder
    return [path for at in (folder, by_default) if (path := at / SWAP_LOG).exists()]


def state_folder() -> Path:
    """The folder for this user's files that outlive a daemon."""
    base = os.environ.get("XDG_STATE_HOME")  # noqa: TID251
    return (Path(base) if base else Path("~/.local/state").expanduser()).absolute() / "swapd"


def _folder_name(device: str) -> str:
    return "cuda0" if device == "cuda" else device.replace(":", "")


def endpoint_from_environment() -> str | None:
    """The daemon's folder, as `$SWAPD_ENDPOINT` names it."""
    return _unless_service(os.environ.get(ENDPOINT_VARIABLE))  # noqa: TID251


def variable(name: str) -> str | None:
    """The value of one of the variables above; None if it is empty or not set."""
    return os.environ.get(name) or None  # noqa: TID251


def is_disabled() -> bool:
    """Whether `$SWAPD_DISABLE` has this process do without swapd. Raises: ConfigError."""
    said = variable(DISABLE_VARIABLE) or "0"
    if said.lower() not in ("0", "1", "false", "true"):
        raise ConfigError(f"${DISABLE_VARIABLE} is {said!r}: 1 or true does without swapd, 0 not")
    if disabled := said.lower() in ("1", "true"):
        log.warning("this process does without swapd, as $%s says", DISABLE_VARIABLE)
    return disabled


def reconnect_s() -> float:
    """How long a client waits for the next daemon, by `$SWAPD_RECONNECT`. Raises: ConfigError."""
    try:
        return parse_span(variable(RECONNECT_VARIABLE) or RECONNECT)
    except ValueError as exc:
        raise ConfigError(f"${RECONNECT_VARIABLE}: {exc}") from None


def usual_device() -> str:
    """The device that `swapd serve` takes by default: a GPU that this process may use, or host."""
    return "cuda:0" if gpus_here() else "host"


def usual_folder() -> Path:
    """The runtime folder of that device by default."""
    return default_folder(usual_device())


def gpus_here() -> int:
    """The number of GPUs that this process may use, as the driver's devices and
    $CUDA_VISIBLE_DEVICES show them."""
    there = len([path for path in _DEVICES.glob("nvidia*") if path.name[6:].isdigit()])
    listed = listed_gpus()
    return there if listed is None or not there else len(listed)


def listed_gpus() -> tuple[str, ...] | None:
    """The GPUs that CUDA shows to this process, one by one; none if `$CUDA_VISIBLE_DEVICES` hides
    all. None: it is not set."""
    said = os.environ.get(VISIBLE_VARIABLE)  # noqa: TID251
    return None if said is None else gpus_in(said)


def gpus_in(listed: str) -> tuple[str, ...]:
    """The GPUs that a value of $CUDA_VISIBLE_DEVICES shows: those before the first that is none."""
    names = [name for word in listed.split(",") if (name := word.strip())]
    ends = next((at for at, name in enumerate(names) if name.startswith("-")), len(names))
    return tuple(names[:ends])


def hub_cache() -> Path:
    """Where Hugging Face's library keeps the models that it has downloaded."""
    for variable, below in _HUB_CACHES:
        if said := os.environ.get(variable):  # noqa: TID251
            return Path(os.path.expandvars(said)).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


#: Variables that say where that is, first the one that counts most, and the folder below.
_HUB_CACHES = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)


def environment_of_a_daemon(notify: str, **defaults: str) -> dict[str, str]:
    """The environment of a daemon that this process starts. The daemon notifies `notify` when it
    serves, and not this process's watchdog. `defaults` are settings that no variable sets."""
    given = {f"SWAPD_{name.upper()}": value for name, value in defaults.items()}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WATCHDOG_")}  # noqa: TID251
    return {**given, **kept, NOTIFY_VARIABLE: notify}


def environment_with(**variables: str) -> dict[str, str]:
    """This process's environment, with other values of these variables."""
    return {**os.environ, **variables}  # noqa: TID251


def watchdog_s() -> float | None:
    """systemd's watchdog period for this process; None without a watchdog."""
    meant = os.environ.get("WATCHDOG_PID")  # noqa: TID251
    if meant and meant != str(os.getpid()):
        return None
    period = os.environ.get("WATCHDOG_USEC", "")  # noqa: TID251
    return int(period) / 1e6 if period.isdecimal() and int(period) else None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found, strange = {}, []
    for variable, value in environ.items():
        if not variable.startswith("SWAPD_") or variable in _NO_SETTINGS:
            continue
        name = variable.removeprefix("SWAPD_").lower()
        if name in _KINDS and not _SERVICE.match(value):
            found[name] = _parse(name, value, f"${variable}")
        else:
            strange.append(variable)
    if strange:
        log.warning("%s", _ignored(sorted(strange)))
    return found


def _ignored(variables: list[str]) -> str:
    near = {v: get_close_matches(v.removeprefix("SWAPD_").lower(), _KINDS, n=1) for v in variables}
    meant = [f"for ${v}, did you mean $SWAPD_{m[0].upper()}?" for v, m in near.items() if m]
    named = ", ".join(f"${v}" for v in variables)
    hint = "; ".join(meant) if meant else f"settings are: {', '.join(_KINDS)}"
    return (
        f"ignored, as they are not settings: {named} (Kubernetes sets such for a service called "
        f"swapd); {hint}"
    )


def _unless_service(value: str | None) -> str | None:
    """The value of a variable, unless it is empty or a Kubernetes service."""
    return value if value and not _SERVICE.match(value) else None


def _parse(name: str, value: Any, source: str) -> Any:
    if name not in _KINDS:
        raise ConfigError(f"{source} is not a setting; {meant(name, _KINDS, 'settings are')}")
    try:
        if isinstance(value, str):
            value = _READERS.get(name, str)(value)
        if isinstance(value, str) and (problem := _problem_with(value)):
            raise ValueError(problem)
        found = msgspec.convert(value, _KINDS[name], strict=False)
        return value if isinstance(value, Size) else found
    except (ValueError, msgspec.ValidationError) as exc:
        raise ConfigError(f"{source}: {exc}") from exc


def _span(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_span(text)


def _chunk(text: str) -> Size | str:
    return text if text == "auto" else typed_size(text)


#: Settings in bytes.
SIZES = ("budget", "chunk", "host_memory", "keep_host", "pin_limit", "swap_log_size")

#: How the text of a setting is read that is not itself the value.
_READERS: dict[str, Callable[[str], Any]] = {
    "bandwidth": parse_rate,
    **dict.fromkeys(SIZES, typed_size),
    "chunk": _chunk,
    **dict.fromkeys(("ack_timeout", "linger", "patience", "residency_bound", "turn"), _span),
    **dict.fromkeys(("stop_timeout", "swap_log_age"), _span),
}


def shown(name: str, value: Any) -> str:
    """The value of a setting, for people."""
    if value is None:
        return "default"
    return size(value) if name in SIZES and isinstance(value, int) else str(value)


def _problem_with(text: str) -> str | None:
    """The reason why no setting can have this text, for people; None if one can."""
    if len(text) > _TEXT_MAX_CHARS:
        return f"has {len(text)} characters; at most {_TEXT_MAX_CHARS}"
    return None if text.isprintable() else f"{text!r} has characters that cannot be printed"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
