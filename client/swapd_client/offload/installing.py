"""Chooses the modules of a model that get hooks, wrapped methods and guards."""

import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch.nn import Embedding, Module, Sequential

from swapd_client.errors import InvalidSource
from swapd_client.offload import find, growth, guards, hooks
from swapd_client.offload.attachment import Attached, Attachment
from swapd_client.offload.find import Found
from swapd_client.offload.first_call import FirstCall, Part
from swapd_client.offload.gate import Gate
from swapd_client.offload.growth import Growth
from swapd_client.offload.lender import Lender
from swapd_client.offload.returned import Lent
from swapd_client.offload.scope import Block, Holdable, Hooks, Leased, Passed
from swapd_client.offload.weights_of import Registered

#: Callers outside of a component call its modules down to this depth.
DEPTH = 2

#: By component, or for all that have them.
Methods = Mapping[str, Sequence[str]] | Sequence[str]


def methods_of(found: Sequence[Found], named: Methods) -> dict[str, list[str]]:
    """The methods of each component that must hold it: its own, and those `named`.

    Raises: InvalidSource, if a component or its method does not exist.
    """
    modules = {one.name: find.bare(one.module) for one in found}
    methods = {name: set(hooks.methods_of(module)) for name, module in modules.items()}
    if isinstance(named, Mapping):
        for name, wanted in named.items():
            if name not in modules:
                there = ", ".join(modules)
                raise InvalidSource(f"wrap_methods: no component {name!r}; there are: {there}")
            for method in wanted:
                if not callable(getattr(modules[name], method, None)):
                    raise InvalidSource(f"wrap_methods: {name!r} has no method {method!r}")
            methods[name].update(wanted)
    else:
        for method in named:
            having = [n for n, m in modules.items() if callable(getattr(m, method, None))]
            if not having:
                raise InvalidSource(f"wrap_methods: no component has a method {method!r}")
            for name in having:
                methods[name].add(method)
    return {name: sorted(names) for name, names in methods.items()}


class Installer:
    """Installs on a model's modules, for `Attachment._uninstall` to remove."""

    def __init__(
        self, client: Lender, attachment: Attachment, roots: Mapping[str, Module], starts: set[int]
    ) -> None:
        """`starts`: the root modules of components, by id."""
        self._client = client
        self._attachment = attachment
        self._roots = roots
        self._starts = starts
        self._hooked: set[int] = set()
        self._parts: list[Part] = []
        #: The originals of compiled modules, by id.
        self._compiled = {
            id(find.bare(module))
            for root in roots.values()
            for module in root.modules()
            if find.bare(module) is not module
        }
        self._gone = attachment._daemon_gone

    def outside(self, module: Module, names: Sequence[str]) -> None:
        """Hook a module that uses tensors of components, but is not in exactly one."""
        held = Leased(self._client, list(names))
        parameters = tuple(p for p in module._parameters.values() if p is not None)
        name, lent = "+".join(names), self._lent(names)
        self._hook(module, Gate(name, held, held, held, parameters, None, self._gone, lent))

    def component(self, one: Attached, methods: Sequence[str]) -> None:
        """Hook one component that has something to hold."""
        assert one.held is not None
        known = _known(self._client, self._attachment.trained)
        grown = Growth(one.name, _modules_now(one.module, self._starts), known)
        self._attachment._to_undo(growth.watch(grown, self._modules(one)))
        parameters = tuple(
            parameter
            for module in self._modules(one)
            for parameter in module._parameters.values()
            if parameter is not None
        )

        all_lent = self._lent(one.all_of_it.names)

        def gate_of(held: Holdable, all_of_it: Holdable) -> Gate:
            assert one.held is not None
            lent = self._lent(held.names) if isinstance(held, Block) else all_lent
            return Gate(
                one.name, held, one.held, all_of_it, parameters, grown, self._gone, lent, all_lent
            )

        whole = gate_of(one.held, one.all_of_it)
        aside = one.held.hooks if isinstance(one.held, Passed) else None
        inside: dict[int, Gate] = {}
        parts: list[Part] = []
        for block, held in one.blocks.items():
            gate = gate_of(held, one.all_of_it)
            inside.update((id(module), gate) for module in block.modules())
            parts.append(Part(gate, held.names, set(block.modules())))
            self._hook(block, gate, aside)
        for module in parts_of_first(one):
            self._hook(module, inside[id(module)], aside)
        found = entrances(one.module, self._starts)
        beside = gate_of(Block(one.held, None), one.held) if isinstance(one.held, Passed) else whole
        for module, is_member in found.items():
            layer = module is not one.module and is_layer(module)
            if aside is not None and (is_member or layer):
                self._hook(module, inside.get(id(module), beside), aside)
            else:
                gate = inside.get(id(module), whole)
                self._hook(module, gate, layer=layer or is_member, is_member=is_member)
        if find.bare(one.module) is not one.module:
            self._attachment._to_undo(hooks.wrap_twin(one.module, whole))
        if parts:
            self._watch(one.module, ["forward", *methods], whole, parts)
        self._parts += parts or [Part(whole, one.all_of_it.names, set(self._modules(one)))]
        for method in methods:
            self._attachment._to_undo(hooks.wrap(find.bare(one.module), method, whole))

    def around(self) -> None:
        """Watch the modules around components. Call it once all components have their hooks."""
        for root in self._roots.values():
            if id(root) not in self._starts and find.is_called(root):
                self._watch(root, ["forward"], None, self._parts)

    def _watch(
        self, module: Module, methods: Sequence[str], gate: Gate | None, parts: Sequence[Part]
    ) -> None:
        to_undo = self._attachment._to_undo
        for name in methods:
            to_undo(hooks.put(module, FirstCall(module, name, gate, parts, to_undo)))

    def _lent(self, names: Iterable[str]) -> Lent:
        parts = map(self._client.session.own, names)
        return Lent((part.address, part.address + part.nbytes) for part in parts)

    def guard(self, one: Attached) -> None:
        """Guard other operations, on all modules of the model: tensors may be tied across them."""
        parts = [self._client.session.own(name) for name in one.all_of_it.names]
        weights = Registered(
            self._client,
            one.name,
            parts,
            lambda: self._attachment.use(one.name),
            frozenset(one.module.modules()),
        )
        for root in self._roots.values():
            self._attachment._to_undo(guards.guard(root, weights))

    def _hook(
        self,
        module: Module,
        gate: Gate,
        aside: Hooks | None = None,
        *,
        layer: bool = False,
        is_member: bool = False,
    ) -> None:
        """`aside` removes these hooks at times. `is_member`: as in `hooks.install`."""
        if id(module) in self._hooked:
            return
        self._hooked.add(id(module))
        is_compiled = id(module) in self._compiled
        pair, undo = hooks.install(module, gate, is_compiled=is_compiled, is_member=is_member)
        self._attachment._to_undo(undo)
        if aside is not None:
            aside.add(pair)
        elif layer:
            pair.leave_if_entered()

    def _modules(self, one: Attached) -> Iterator[Module]:
        return find.walk(one.module, self._starts)


# The table that watches growth belongs to the whole process, so it must not keep the model alive.


def _modules_now(root: Module, starts: set[int]) -> Callable[[], Iterable[Module]]:
    """Returns a function: the modules of a component, as long as it lives."""
    living = weakref.ref(root)

    def modules() -> Iterable[Module]:
        module = living()
        return () if module is None else find.walk(module, starts)

    return modules


def _known(client: Lender, trained: Container[int]) -> Callable[[torch.Tensor], bool]:
    """Returns a function: whether a tensor is in components of a client, or is `trained`."""

    def known(tensor: torch.Tensor) -> bool:
        if id(tensor) in trained:
            return True
        parts = list(client.session.components.values())
        return all(
            any(0 <= start - part.address < part.nbytes for part in parts)
            for start, _ in find.bytes_in(tensor)
        )

    return known


def parts_of_first(one: Attached) -> Iterator[Module]:
    """The parts of a streamed component's first block.

    Caches between steps (TeaCache) call them directly to decide whether to run any block.
    """
    for block in one.blocks:
        return block.children()
    return iter(())


def is_layer(module: Module) -> bool:
    """Whether the module is a single layer whose call ends when it returns.

    A module with children may return a generator, which must hold the component until it ends.
    """
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not module._modules and not any(is_later(module.forward) for is_later in later)


def entrances(root: Module, starts: set[int]) -> dict[Module, bool]:
    """The modules of a component that callers outside of it call; True: the members of a list.

    The root, its children and theirs, and embeddings at any depth. A list or a dict is no level.
    The modules in it, or in a Sequential, are members, and what is in these is no entrance. Nor are
    modules that are compiled into one with the module around them.
    """
    found = {root: False}
    waiting = [(root, 0)]
    while waiting:
        module, depth = waiting.pop()
        if find.bare(module) is not module:
            continue
        listed = isinstance(module, (*find.CONTAINERS, Sequential))
        for child in module._modules.values():
            if child is None or id(child) in starts:
                continue
            is_list = isinstance(child, find.CONTAINERS)
            if isinstance(child, Embedding):
                found[child] = False
            elif depth < DEPTH and not is_list:
                found[child] = listed and found.get(child, True)
            inside = DEPTH if listed else depth + (not isinstance(child, Sequential))
            waiting.append((child, depth if is_list else inside))
    return found
