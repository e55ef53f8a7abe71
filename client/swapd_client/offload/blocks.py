"""Finds the blocks of a component: modules that run one after the other, loaded one by one."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.nn import Identity, Module, ModuleList, Sequential

from swapd.shared.units import size
from swapd_client.errors import InvalidSource
from swapd_client.memory.movable import nbytes_of
from swapd_client.offload.search import is_called

#: The attribute by which a model's class names its lists of blocks.
ATTRIBUTE = "_layerwise_offload_blocks_attrs"
_OLD_ATTRIBUTE = "_layerwise_offload_blocks_attr"

_NAMED = 4

#: Detected lists must hold this share of the component's bytes.
_MOST = 0.5
#: A list below this share of all lists' bytes is not worth streaming.
_LITTLE = 0.05


@dataclass(frozen=True)
class ModelBlock:
    """One part of a component: a block, or several small neighbours."""

    #: Path in the component: "transformer_blocks.3", or "transformer_blocks.0-3".
    name: str
    #: The modules that are called.
    modules: tuple[Module, ...]
    nbytes: int


def blocks_of(
    component: Module, named: Sequence[str] | None = None, least: int = 0
) -> list[ModelBlock]:
    """Return the blocks of a component in order of declaration; [] if there are none.

    `named`: paths of lists of blocks, or of single blocks. Default: what the component's class
    declares, or else the lists of like modules that hold most of its bytes. Neighbours in a list
    are joined until they have `least` bytes, since each block takes a whole chunk. Raises:
    InvalidSource, if a path does not exist.
    """
    if named is not None:
        lists = [_at(component, path, "blocks") for path in named]
    elif (attributes := _declared(component)) is not None:
        lists = [
            _at(component, path, f"{type(component).__name__}.{ATTRIBUTE}") for path in attributes
        ]
    else:
        lists = _detected(component)
    seen: set[int] = set()
    return [block for found in lists for block in _grouped(found, least, seen)]


#: A path, and the modules there by path.
_Found = tuple[str, dict[str, Module]]


def finer(modules: Iterable[Module], needed: int) -> str:
    """Return advice for modules that do not fit; they need `needed` bytes of the device."""
    inside = [named for module in modules for named in module.named_children()]
    while len(inside) == 1:
        path, only = inside[0]
        inside = [(f"{path}.{name}", child) for name, child in only.named_children()]
    sizes = {name: _nbytes([child]) for name, child in inside}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    there = ", ".join(f"{name} ({size(sizes[name])})" for name in largest)
    if not there:
        return f"it has no modules that could come one by one. It needs a budget of {size(needed)}"
    return f"name in blocks= its modules that run one after the other (largest: {there})"


def _declared(component: Module) -> Sequence[str] | None:
    names = getattr(component, ATTRIBUTE, None)
    if names is None and (old := getattr(component, _OLD_ATTRIBUTE, None)) is not None:
        warnings.warn(
            f"{type(component).__name__}.{_OLD_ATTRIBUTE} is deprecated; set {ATTRIBUTE} = "
            f"[{old!r}] instead",
            FutureWarning,
            stacklevel=2,
        )
        names = old
    return [names] if isinstance(names, str) else names


def _at(component: Module, path: str, who: str) -> _Found:
    try:
        module = component.get_submodule(path)
    except AttributeError:
        lists = [p for p, m in component.named_modules() if isinstance(m, ModuleList)]
        there = (
            f"the lists there are: {', '.join(lists)}" if lists else "there is no list of modules"
        )
        raise InvalidSource(
            f"{who} names {path!r}, and {type(component).__name__} has no such module; {there}"
        ) from None
    if isinstance(module, (ModuleList, Sequential)):
        return path, {f"{path}.{name}": child for name, child in module.named_children()}
    return path, {path: module}


def _detected(component: Module) -> list[_Found]:
    lists = list(lists_of(component))
    sizes = [_nbytes(children.values()) for _, children in lists]
    if sum(sizes) < _MOST * _nbytes([component]):
        return []
    return [found for found, size in zip(lists, sizes, strict=True) if size >= _LITTLE * sum(sizes)]


def lists_of(module: Module, path: str = "") -> Iterator[_Found]:
    """Yield the outermost lists of several modules of one class in `module`, whose path is `path`.

    Identity modules do not count: in vLLM's pipelines they stand for modules of another process.
    """
    children = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    here = {name: child for name, child in children.items() if not isinstance(child, Identity)}
    alike = len({type(child) for child in here.values()}) == 1
    if isinstance(module, ModuleList) and len(here) > 1 and alike:
        yield path, here
    else:
        for name, child in children.items():
            yield from lists_of(child, name)


def _grouped(found: _Found, least: int, seen: set[int]) -> Iterator[ModelBlock]:
    path, children = found
    names: list[str] = []
    modules: list[Module] = []
    parameters: dict[int, int] = {}  # bytes by id
    for name, module in children.items():
        if id(module) in seen:
            continue  # one block under several names runs several times
        seen.add(id(module))
        names.append(name)
        modules += _called(module)
        parameters.update((id(p), nbytes_of(p)) for p in module.parameters())
        if (nbytes := sum(parameters.values())) >= least:
            yield _block(path, names, modules, nbytes)
            names, modules, parameters = [], [], {}
    if modules:
        yield _block(path, names, modules, sum(parameters.values()))


def _called(module: Module) -> Iterator[Module]:
    """Yield the module; for a list, which torch never calls, the modules in it."""
    if is_called(module):
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def _block(path: str, names: list[str], modules: list[Module], nbytes: int) -> ModelBlock:
    first, last = names[0], names[-1]
    name = first if len(names) == 1 else f"{first}-{last[len(path) + 1 :]}"
    return ModelBlock(name, tuple(modules), nbytes)


def _nbytes(modules: Iterable[Module]) -> int:
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return sum(nbytes_of(p) for p in parameters.values())
