"""Chooses the modules of a model that get hooks, wrapped methods and guards."""

import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch.nn import Embedding, Module, Sequential

from swapd_client.errors import InvalidSource
from swapd_client.memory.movable import extent, leaves
from swapd_client.offload import growth, guards, hooks, search
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.automatic import CONTAINERS
from swapd_client.offload.first_call import FirstCall, ReadPart
from swapd_client.offload.gate import LeaseGate
from swapd_client.offload.growth import Growth
from swapd_client.offload.holdables import AttachedComponent, BlockHold, PassHold
from swapd_client.offload.hooks import BlockHooks
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.outputs import ComponentSpans
from swapd_client.offload.ownership import own_parameters, part_at
from swapd_client.offload.scope import ComponentHold, Holdable
from swapd_client.offload.search import ComponentModule
from swapd_client.offload.strategy import refuse_unknown
from swapd_client.offload.weights import ComponentWeights

#: Outside code calls the modules of a component down to this depth.
DEPTH = 2

#: By component, or for all that have them.
Methods = Mapping[str, Sequence[str]] | Sequence[str]


def methods_of(found: Sequence[ComponentModule], named: Methods) -> dict[str, list[str]]:
    """Return the methods of each component that must hold it: its own, and those `named`.

    Raises: InvalidSource, if a component or its method does not exist.
    """
    modules = {one.name: search.bare(one.module) for one in found}
    given = named if isinstance(named, Mapping) else _having(modules, named)
    refuse_unknown("wrap_methods", given, modules)
    for name, wanted in given.items():
        for method in wanted:
            if not _has(modules[name], method):
                raise InvalidSource(f"wrap_methods: {name!r} has no method {method!r}")
    return {
        name: sorted({*hooks.methods_of(module), *given.get(name, ())})
        for name, module in modules.items()
    }


def _having(modules: Mapping[str, Module], named: Sequence[str]) -> Mapping[str, Sequence[str]]:
    for method in named:
        if not any(_has(module, method) for module in modules.values()):
            raise InvalidSource(f"wrap_methods: no component has a method {method!r}")
    return {
        name: [method for method in named if _has(module, method)]
        for name, module in modules.items()
    }


def _has(module: Module, method: str) -> bool:
    """Whether the module itself or its class has the method; not its children, or a wrapped one."""
    own = method in vars(module) or hasattr(type(module), method)
    return own and callable(getattr(module, method))


class Installer:
    def __init__(
        self,
        client: AttachClient,
        attachment: Attachment,
        roots: Mapping[str, Module],
        starts: set[int],
    ) -> None:
        """`starts`: ids of the root modules of components."""
        self._client = client
        self._attachment = attachment
        self._roots = roots
        self._starts = starts
        self._hooked: set[int] = set()
        self._parts: list[ReadPart] = []
        #: Ids of the originals of compiled modules.
        self._compiled = {
            id(search.bare(module))
            for root in roots.values()
            for module in root.modules()
            if search.bare(module) is not module
        }

    def outside(self, module: Module, names: Sequence[str]) -> None:
        """Hook a module that uses tensors of components without being in exactly one component."""
        held = ComponentHold(self._client, list(names))
        parameters = tuple(p for _, p in own_parameters(module))
        name, lent = "+".join(names), self._lent(names)
        self._hook(module, LeaseGate(name, held, held, held, parameters, None, lent, lent))

    def component(self, one: AttachedComponent, methods: Sequence[str]) -> None:
        assert one.held is not None
        modules = list(search.walk(one.module, self._starts))
        gates = self._gates_of(one, modules)
        whole = gates(one.held, one.all_of_it)
        parts: list[ReadPart] = []
        if isinstance(one.held, PassHold):
            parts = self._blocks(one, one.held, gates)
        for module, is_member in entrances(one.module, self._starts).items():
            self._hook(module, whole, is_member=is_member)
        if search.bare(one.module) is not one.module:
            hooks.hook_original(one.module, whole, self._attachment.to_undo)
        if parts:
            self._watch(one.module, ["forward", *methods], whole, parts)
        self._parts += parts or [ReadPart(whole, one.all_of_it.names, set(modules))]
        for method in methods:
            hooks.wrap(search.bare(one.module), method, whole, self._attachment.to_undo)

    def _gates_of(
        self, one: AttachedComponent, modules: Sequence[Module]
    ) -> Callable[[Holdable, Holdable], LeaseGate]:
        known = _known(self._client, self._attachment.trained)
        grown = Growth(one.name, _modules_now(one.module, self._starts), known)
        growth.watch(grown, modules, self._attachment.to_undo)
        parameters = tuple(p for module in modules for _, p in own_parameters(module))
        all_lent = self._lent(one.all_of_it.names)
        whole = one.held
        assert whole is not None

        def gate(held: Holdable, all_of_it: Holdable) -> LeaseGate:
            lent = self._lent(held.names) if isinstance(held, BlockHold) else all_lent
            return LeaseGate(one.name, held, whole, all_of_it, parameters, grown, lent, all_lent)

        return gate

    def _blocks(
        self,
        one: AttachedComponent,
        held: PassHold,
        gates: Callable[[Holdable, Holdable], LeaseGate],
    ) -> list[ReadPart]:
        parts: list[ReadPart] = []
        inside: dict[Module, LeaseGate] = {}
        for block, its in one.blocks.items():
            gate = gates(its, one.all_of_it)
            inside.update(dict.fromkeys(block.modules(), gate))
            parts.append(ReadPart(gate, its.names, set(block.modules())))
            self._hook(block, gate, held.hooks)
        # caches between steps (TeaCache) call these to decide whether to run any block
        for module in next(iter(one.blocks)).children():
            self._hook(module, inside[module], held.hooks)
        beside = gates(BlockHold(held, None), held)
        for module, is_member in entrances(one.module, self._starts).items():
            if is_member or (module is not one.module and is_layer(module)):
                self._hook(module, inside.get(module, beside), held.hooks)
            elif module in inside:
                self._hook(module, inside[module])
        return parts

    def around(self) -> None:
        """Watch the modules around components, which must have their hooks."""
        for root in self._roots.values():
            if id(root) not in self._starts and search.is_called(root):
                self._watch(root, ["forward"], None, self._parts)

    def _watch(
        self,
        module: Module,
        methods: Sequence[str],
        gate: LeaseGate | None,
        parts: Sequence[ReadPart],
    ) -> None:
        to_undo = self._attachment.to_undo
        for name in methods:
            call = FirstCall(module, name, gate, parts, to_undo)
            to_undo(call.end)
            hooks.put(module, call, to_undo)

    def _lent(self, names: Iterable[str]) -> ComponentSpans:
        parts = map(self._client.session.own, names)
        return ComponentSpans((part.address, part.address + part.nbytes) for part in parts)

    def guard(self, one: AttachedComponent) -> None:
        """Guard all modules of the model: tensors may be tied across them."""
        parts = [self._client.session.own(name) for name in one.all_of_it.names]
        weights = ComponentWeights(
            self._client,
            one.name,
            parts,
            lambda *what: self._attachment.use(*(what or [one.name])),
            frozenset(one.module.modules()),
        )
        for root in self._roots.values():
            guards.guard(root, weights, self._attachment.to_undo)

    def _hook(
        self,
        module: Module,
        gate: LeaseGate,
        aside: BlockHooks | None = None,
        *,
        is_member: bool = False,
    ) -> None:
        """`aside` removes this hook at times."""
        if id(module) in self._hooked:
            return
        self._hooked.add(id(module))
        is_compiled = id(module) in self._compiled
        hook = hooks.install(
            module, gate, self._attachment.to_undo, is_compiled=is_compiled, is_member=is_member
        )
        if aside is not None:
            aside.add(hook)


# The table of watched modules is the whole process's, so it must not keep the model alive.


def _modules_now(root: Module, starts: set[int]) -> Callable[[], Mapping[str, Module]]:
    living = weakref.ref(root)

    def now() -> Mapping[str, Module]:
        module = living()
        if module is None:
            return {}
        inside = set(search.walk(module, starts))
        return {path: one for path, one in module.named_modules() if one in inside}

    return now


def _known(client: AttachClient, trained: Container[int]) -> Callable[[torch.Tensor], bool]:
    def known(tensor: torch.Tensor) -> bool:
        inner = [one for _, one in leaves("", tensor) if extent(one)[1]]
        return id(tensor) in trained or all(part_at(client, one) is not None for one in inner)

    return known


def is_layer(module: Module) -> bool:
    """Whether the module is a single layer whose call ends when it returns.

    A module with children may return a generator, which must hold the component until it ends.
    """
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not module._modules and not any(is_later(module.forward) for is_later in later)


def entrances(root: Module, starts: set[int]) -> dict[Module, bool]:
    """Return the modules of a component that outside code calls; True for members of a list.

    They are the root, its children and theirs, and embeddings at any depth. A list or a dict is no
    level. Modules in one, or in a Sequential, are members, and only embeddings inside members
    count. Modules compiled into one with the module around them do not count.
    """
    found = {root: False}
    waiting = [(root, 0)]
    while waiting:
        module, depth = waiting.pop()
        if search.bare(module) is not module:
            continue
        listed = isinstance(module, (*CONTAINERS, Sequential))
        for child in search.children(module, starts):
            if isinstance(child, CONTAINERS):
                waiting.append((child, depth))
                continue
            if isinstance(child, Embedding):
                found[child] = False
            elif depth < DEPTH:
                found[child] = listed and found.get(child, True)
            level = 0 if isinstance(child, Sequential) else 1
            waiting.append((child, DEPTH if listed else depth + level))
    return found
