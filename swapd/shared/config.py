"""The daemon's settings, with their only defaults. No other module reads the environment.

A setting comes from its flag, else `SWAPD_<NAME>`, else the TOML file, else its default. An unknown
setting is an error. An unknown variable is only a warning, because other software may have set it.
"""

import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from swapd.shared import documents
from swapd.shared.errors import UserError
from swapd.shared.runtime_dir import SWAP_LOG
from swapd.shared.text import meant
from swapd.shared.units import Size, parse_rate, parse_span, size, typed_size

log = logging.getLogger("swapd.shared.config")

#: The runtime folder for clients; the TOML file of the daemon.
ENDPOINT_VARIABLE = "SWAPD_ENDPOINT"
CONFIG_VARIABLE = "SWAPD_CONFIG"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
#: The secret for the daemon's page. It is no setting, because command lines are public.
HTTP_TOKEN_VARIABLE = "SWAPD_HTTP_TOKEN"
#: The stage of `swapd run FILE` to which a process belongs.
STAGE_VARIABLE = "SWAPD_STAGE"
#: Whether clients do without swapd; and the daemon's device, which they then use.
DISABLE_VARIABLE = "SWAPD_DISABLE"
DEVICE_VARIABLE = "SWAPD_DEVICE"
#: A setting that `swapd run` removes for its daemons.
LINGER_VARIABLE = "SWAPD_LINGER"
#: Where systemd listens for the daemon's state.
NOTIFY_VARIABLE = "NOTIFY_SOCKET"
#: Descriptors that systemd holds for the daemon, since version 254.
STORE_VARIABLE = "FDSTORE"
RECONNECT_VARIABLE = "SWAPD_RECONNECT"
RECONNECT = "30s"
_NO_SETTINGS = frozenset(
    (ENDPOINT_VARIABLE, CONFIG_VARIABLE, HTTP_TOKEN_VARIABLE, STAGE_VARIABLE, RECONNECT_VARIABLE)
)

#: Names of devices; group 1 is the index of a GPU. "cuda0" is for systemd, where a colon in the
#: name of a folder has another meaning.
DEVICE_NAME = re.compile(r"host|cuda(?::?([0-9]+))?")

#: Under `chunk = "auto"`, a GPU's budget over LARGE_BUDGET has chunks of LARGE_CHUNK: evicting a
#: component of some GiB then takes a quarter of the driver calls, and the last chunk wastes little.
#: The default only under strict isolation, where acquires wait for these calls.
LARGE_BUDGET = 8 << 30
LARGE_CHUNK = 256 << 20
GPU_CHUNK = 64 << 20
#: Below this budget, a GPU has the chunks of the host device, as larger ones would waste much.
SMALL_BUDGET = 1 << 30
HOST_CHUNK = 2 << 20

#: Largest values of the core's rules, which messages and the swap log can hold: JSON has no
#: infinity.
RULE_MAX = 1e9
RULE_MAX_INT = (1 << 63) - 1

#: Most names in `order`.
ORDERED_MAX = 128

#: Kubernetes sets SWAPD_PORT to the address of a service called swapd.
_SERVICE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
#: NVIDIA's driver has a file there for each GPU: nvidia0, nvidia1.
_DEVICES = Path("/dev")
_TEXT_MAX_CHARS = 4096


class ConfigError(UserError):
    """The message names the setting and its valid values."""


def gpu_number(device: str) -> int | None:
    """Return the index in the name of a GPU; None for the host device."""
    found = DEVICE_NAME.fullmatch(device)
    return int(found[1] or 0) if found and device != "host" else None


def canonical(device: str) -> str:
    """Return the daemon's name for this device, as in "cuda:0" for "cuda"."""
    number = gpu_number(device)
    return device if number is None else f"cuda:{number}"


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
            le=RULE_MAX_INT,
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
        Meta(
            description="Seconds a worker that runs has to unmap before it is fenced",
            gt=0,
            le=RULE_MAX,
        ),
    ] = 60.0
    residency_factor: Annotated[
        float,
        Meta(
            description="A busy component stays this many times its swap-in time",
            ge=0,
            le=RULE_MAX,
        ),
    ] = 8.0
    residency_bound: Annotated[
        float, Meta(description="and at most so many seconds", ge=0, le=RULE_MAX)
    ] = 2.0
    patience: Annotated[
        float,
        Meta(
            description="Seconds after which a waiter goes first, any priority", gt=0, le=RULE_MAX
        ),
    ] = 30.0
    eviction: Annotated[
        Literal["next_use", "lru"],
        Meta(description="next_use: first what is needed last, by the order of uses so far"),
    ] = "next_use"
    order: Annotated[
        str | None,
        Meta(
            description="What is used after what, as in thinker,talker,code2wav; several orders: "
            "a semicolon between; default: as programs say"
        ),
    ] = None
    overtake: Annotated[
        int,
        Meta(
            description="So many later acquires of what is in go before the first that waits",
            ge=0,
            le=RULE_MAX_INT,
        ),
    ] = 16
    overtake_of: Annotated[
        str | None,
        Meta(
            description="Another --overtake for acquires of some components, parts of one or "
            "members of a group, as in talker=0,images=64"
        ),
    ] = None
    turn: Annotated[
        float, Meta(description="and for so many seconds at most", gt=0, le=RULE_MAX)
    ] = 600.0
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
    def orders(self) -> tuple[tuple[str, ...], ...]:
        return _orders(self.order or "")

    @property
    def overtakes(self) -> tuple[tuple[str, int], ...]:
        return _overtakes(self.overtake_of or "")

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
    """`large`: LARGE_CHUNK is allowed."""
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
    """Read the settings. `flags`: only those given. `defaults`: functions that choose what no
    source sets, in place of the defaults of `Config`.

    Unknown variables are logged and ignored. Raises: ConfigError, with the setting and its source.
    """
    environ = os.environ if environ is None else environ  # noqa: TID251
    if path is None and (named := _unless_service(environ.get(CONFIG_VARIABLE))):
        path = Path(named)
    merged = {
        **(parsed(read_toml(path), f"{path}: ") if path else {}),
        **_from_environment(environ),
        **{name: _parse(name, value, flag(name)) for name, value in flags.items()},
    }
    chosen = {name: choose() for name, choose in defaults.items() if name not in merged}
    return Config(**merged, **chosen)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises: ConfigError if the file is unreadable or not TOML."""
    try:
        return tomllib.loads(documents.read(path))
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # not TOML, or not text
        raise ConfigError(f"{path}: {exc}") from exc


def parsed(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of a file's table. `source`: prefix of names in errors. Raises:
    ConfigError."""
    return {name: _parse(name, value, f"{source}{name}") for name, value in raw.items()}


def default_folder(device: str) -> Path:
    return _runtime_folders() / _folder_name(device)


def _runtime_folders() -> Path:
    base = _absolute("XDG_RUNTIME_DIR")
    return base / "swapd" if base else Path(f"/tmp/swapd-{os.getuid()}")


def _absolute(variable: str) -> Path | None:
    """Ignore a relative path, as XDG's specification says: each working folder would have a daemon
    of its own."""
    path = Path(os.environ.get(variable, ""))  # noqa: TID251
    return path if path.is_absolute() else None


def logs_left_by(folder: Path) -> list[Path]:
    by_default = state_folder() / folder.name if folder == default_folder(folder.name) else folder
    return [path for at in (folder, by_default) if (path := at / SWAP_LOG).exists()]


def state_folder() -> Path:
    try:
        usual = Path("~/.local/state")
        return (_absolute("XDG_STATE_HOME") or usual.expanduser().absolute()) / "swapd"
    except RuntimeError:  # without $HOME, this user has none, as in some containers
        return _runtime_folders()


def _folder_name(device: str) -> str:
    return "cuda0" if device == "cuda" else device.replace(":", "")


def endpoint_from_environment() -> str | None:
    return _unless_service(os.environ.get(ENDPOINT_VARIABLE))  # noqa: TID251


def variable(name: str) -> str | None:
    """An empty variable counts as not set."""
    return os.environ.get(name) or None  # noqa: TID251


def is_disabled() -> bool:
    """Return whether this process does without swapd. Raises: ConfigError."""
    said = variable(DISABLE_VARIABLE) or "0"
    if said.lower() not in ("0", "1", "false", "true"):
        raise ConfigError(f"${DISABLE_VARIABLE} is {said!r}: 1 or true does without swapd, 0 not")
    if disabled := said.lower() in ("1", "true"):
        log.warning("this process does without swapd, as $%s says", DISABLE_VARIABLE)
    return disabled


def reconnect_s() -> float:
    """Raises: ConfigError."""
    try:
        return parse_span(variable(RECONNECT_VARIABLE) or RECONNECT)
    except ValueError as exc:
        raise ConfigError(f"${RECONNECT_VARIABLE}: {exc}") from None


def usual_device() -> str:
    """Return the default device of `swapd serve`: a GPU that this process may use, by the driver's
    device files and $CUDA_VISIBLE_DEVICES, else host. Does not call the driver."""
    return "cuda:0" if gpu_nodes() and listed_gpus() != () else "host"


def usual_folder() -> Path:
    return default_folder(usual_device())


def gpu_nodes() -> list[Path]:
    return sorted(path for path in _DEVICES.glob("nvidia*") if path.name[6:].isdigit())


def listed_gpus() -> tuple[str, ...] | None:
    """Return the GPUs that $CUDA_VISIBLE_DEVICES shows; () if it hides all, None if it is not
    set."""
    said = os.environ.get(VISIBLE_VARIABLE)  # noqa: TID251
    return None if said is None else gpus_in(said)


def gpus_in(listed: str) -> tuple[str, ...]:
    """Return the GPUs in a value of $CUDA_VISIBLE_DEVICES: those before the first negative
    number."""
    names = [name for word in listed.split(",") if (name := word.strip())]
    ends = next((at for at, name in enumerate(names) if name.startswith("-")), len(names))
    return tuple(names[:ends])


def hub_cache() -> Path:
    """Return the folder of Hugging Face's cache. It does not exist where the user has no home."""
    for variable, below in _HUB_CACHES:
        if said := os.environ.get(variable):  # noqa: TID251
            return Path(os.path.expanduser(os.path.expandvars(said))) / below
    return Path(os.path.expanduser("~/.cache/huggingface/hub"))


#: Variables that set this folder, the strongest first, and the subfolder of each.
_HUB_CACHES = (
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
)


def environment_of_a_daemon(notify: str = "", **defaults: str) -> dict[str, str]:
    """Return the environment for a daemon that this process starts. The daemon notifies `notify`,
    if given, when it serves, and uses neither the watchdog nor the store of this process.
    `defaults`: settings unless a variable sets them."""
    given = {f"SWAPD_{name.upper()}": value for name, value in defaults.items()}
    mine = ("WATCHDOG_", STORE_VARIABLE)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(mine)}  # noqa: TID251
    return {**given, **kept, NOTIFY_VARIABLE: notify}


def environment_with(**variables: str) -> dict[str, str]:
    return {**os.environ, **variables}  # noqa: TID251


def watchdog_s() -> float | None:
    """Return systemd's watchdog period for this process, if any."""
    meant = os.environ.get("WATCHDOG_PID")  # noqa: TID251
    if meant and meant != str(os.getpid()):
        return None
    period = os.environ.get("WATCHDOG_USEC", "")  # noqa: TID251
    return int(period) / 1e6 if period.isdecimal() and int(period) else None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found, strange = {}, []
    for variable, value in environ.items():
        if not variable.startswith("SWAPD_") or variable in _NO_SETTINGS or not value:
            continue  # empty, as where a composer's own variable is missing, is not set
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
    """Return the value of a variable, unless it is empty or the address of a Kubernetes service."""
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
        raise ConfigError(f"{source}: {exc}{choices(Config, name)}") from exc


def choices(table: type, name: str) -> str:
    """Return what follows an error about this key of a table: its values, if it is a choice."""
    kind = get_type_hints(table).get(name)
    return f"; write {' or '.join(get_args(kind))}" if get_origin(kind) is Literal else ""


def _span(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_span(text)


def _orders(text: str) -> tuple[tuple[str, ...], ...]:
    """Raises: ValueError."""
    orders = [tuple(map(str.strip, order.split(","))) for order in text.split(";") if order.strip()]
    for order in orders:
        if len(order) < 2 or not all(order):
            raise ValueError(f"{','.join(order)!r}: an order has two names at least: first,then")
    if sum(map(len, orders)) > ORDERED_MAX:
        raise ValueError(f"more than {ORDERED_MAX} names; leave out what follows nothing")
    return tuple(orders)


def _overtakes(text: str) -> tuple[tuple[str, int], ...]:
    """Raises: ValueError."""
    bounds = []
    for each in filter(str.strip, text.split(",")):
        name, _, bound = map(str.strip, each.rpartition("="))
        if not (name and bound.isdecimal() and len(bound) < 10):
            raise ValueError(f"{each!r}: takes NAME=NUMBER, several with a comma between")
        bounds.append((name, int(bound)))
    return tuple(bounds)


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a reader that keeps the text if `parse` takes it."""

    def read(text: str) -> str:
        parse(text)
        return text

    return read


def _chunk(text: str) -> Size | str:
    return text if text == "auto" else typed_size(text)


SIZES = ("budget", "chunk", "host_memory", "keep_host", "pin_limit", "swap_log_size")

#: Readers of settings whose value is not the text itself.
_READERS: dict[str, Callable[[str], Any]] = {
    "bandwidth": parse_rate,
    **dict.fromkeys(SIZES, typed_size),
    "chunk": _chunk,
    "order": _checked(_orders),
    "overtake_of": _checked(_overtakes),
    **dict.fromkeys(("ack_timeout", "linger", "patience", "residency_bound", "turn"), _span),
    **dict.fromkeys(("stop_timeout", "swap_log_age"), _span),
}


def shown(name: str, value: Any) -> str:
    if value is None:
        return "default"
    return size(value) if name in SIZES and isinstance(value, int) else str(value)


def _problem_with(text: str) -> str | None:
    if len(text) > _TEXT_MAX_CHARS:
        return f"has {len(text)} characters; at most {_TEXT_MAX_CHARS}"
    return None if text.isprintable() else f"{text!r} has characters that cannot be printed"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
