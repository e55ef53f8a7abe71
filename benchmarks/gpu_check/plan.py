"""The sections, in the order of the run. Stdlib only."""

import importlib.util
from collections.abc import Iterable
from typing import NamedTuple


class Section(NamedTuple):
    """`module` runs for `limit_s` seconds at most; `needs` are the packages it cannot do
    without."""

    group: str
    module: str
    title: str
    limit_s: float
    needs: tuple[str, ...] = ()


CUDA = ("cuda.bindings", "msgspec")
SERVING = (*CUDA, "zmq")
TORCH = (*SERVING, "torch")
#: What `swapd serve` needs beside.
SERVED = (*TORCH, "safetensors", "typer", "rich", "uvloop")

#: Run before all others, and before their time counts.
WARM = Section("facts", "warm", "Torch, before the time counts", 300, ("torch",))

#: The most important ones come first, because the time may run out.
SECTIONS = (
    Section("facts", "facts", "The machine", 40, CUDA),
    Section("probe", "copies", "Copies", 45, CUDA),
    Section("bounds", "swapping", "Swap-in, eviction", 100, SERVING),
    Section("guarantees", "turns", "Workers take turns; graphs; mutable components", 75, TORCH),
    Section("guarantees", "captures", "Graphs captured meanwhile", 60, SERVING),
    Section("guarantees", "deaths", "Workers and daemons are killed", 75, TORCH),
    Section("guarantees", "restarts", "A daemon goes, and another comes", 120, SERVED),
    Section("guarantees", "isolation", "Access outside a lease", 60, TORCH),
    Section("guarantees", "early", "Segments, in stream order", 60, TORCH),
    Section("guarantees", "lending", "Memory lent to a worker's own allocator", 45, TORCH),
    Section("guarantees", "leaking", "Many swap cycles", 60, SERVING),
    Section("bounds", "computing", "Compute that starts early; a decode loop", 60, TORCH),
    Section("bounds", "attached", "A model whose layers stream", 100, (*TORCH, "transformers")),
    Section("bounds", "rivals", "swapd beside sleep and wake, and module.to()", 90, TORCH),
    Section("contract", "contract", "The device contract, on this GPU", 300, (*SERVING, "pytest")),
    Section("probe", "calls", "Costs of the driver's calls", 45, CUDA),
    Section("probe", "pinning", "Pinned host memory", 45, CUDA),
    Section("probe", "flags", "Waiting for a word in memory", 30, CUDA),
    Section("probe", "processes", "One chunk in several processes", 60, CUDA),
    Section("probe", "faults", "Faults of one process", 60, TORCH),
    Section("model", "pipeline", "A real model, end to end", 300, (*TORCH, "transformers")),
    Section("model", "engines", "vLLM's engines with the plugin", 400, (*TORCH, "vllm")),
    Section("model", "kernels", "vLLM's kernels that keep weights", 300, (*TORCH, "vllm")),
)


#: Sections that decide the design, for a GPU that is available for minutes only.
FIRST = ("facts", "calls", "faults", "turns", "captures")


def first() -> tuple[Section, ...]:
    """The sections of `FIRST`, in that order."""
    by_name = {section.module: section for section in SECTIONS}
    return tuple(by_name[name] for name in FIRST)


def rest() -> tuple[Section, ...]:
    """All others."""
    return tuple(section for section in SECTIONS if section.module not in FIRST)


def chosen(names: list[str]) -> tuple[Section, ...]:
    """The sections of the given groups and names; all if none is given. Raises: ValueError."""
    known = {name for s in SECTIONS for name in (s.group, s.module)}
    for name in names:
        if name not in known:
            raise ValueError(f"{name} is no section; there are: {', '.join(sorted(known))}")
    return tuple(s for s in SECTIONS if not names or s.group in names or s.module in names)


#: Their names for pip, if these differ.
_BY_PIP = {"cuda.bindings": "cuda-bindings", "zmq": "pyzmq"}


def missing(names: Iterable[str]) -> list[str]:
    """The packages that cannot be imported."""
    return [name for name in names if not _is_installed(name)]


def lacking(names: Iterable[str]) -> str:
    """The message about missing packages."""
    names = list(names)
    install = " ".join(_BY_PIP.get(name, name) for name in names)
    return f"needs {', '.join(names)}, which this Python lacks: pip install {install}"


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of "cuda.bindings" not even "cuda"
        return False
