"""The places in a module for loaded tensors: parameters and persistent buffers.

Parameters become views of the component. Buffers stay private, because forward may write to them.
"""

from collections.abc import Collection, Iterable, Mapping

import torch

from swapd_client.errors import InvalidSource
from swapd_client.log import log
from swapd_client.memory.movable import check_dense
from swapd_client.weights.safetensors import listed

_Place = tuple[dict[str, torch.nn.Parameter | None], str]


class Slots:
    """One parameter, with all its names and places in a module."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.places: dict[str, _Place] = {}

    @property
    def is_inference(self) -> bool:
        """Whether what `put` returns is an inference tensor."""
        return not self.parameter.is_meta and self.parameter.is_inference()

    def put(self, tensor: torch.Tensor) -> torch.nn.Parameter:
        """Set the parameter to `tensor`; return the parameter.

        A parameter on the meta device is replaced everywhere by a new one, with its attributes.
        """
        parameter = self.parameter
        if not parameter.is_meta:
            parameter.data = tensor
            return parameter
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        new = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad and differentiable)
        vars(new).update(vars(parameter))
        for table, key in self.places.values():
            table[key] = new
        return new


class LoadTarget:
    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots = _parameters(module)
        #: All names of buffers: the module of each, and its name there.
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        #: The persistent ones.
        self.buffers: dict[str, torch.Tensor] = {}
        bare = []
        for prefix, sub in module.named_modules(remove_duplicate=False):
            for key, buffer in sub.named_buffers(recurse=False, remove_duplicate=False):
                name = f"{prefix}.{key}".lstrip(".")
                self._owners[name] = sub, key
                # no public way to ask: `state_dict` runs hooks, which copy an attached module
                if key not in sub._non_persistent_buffers_set:
                    self.buffers[name] = buffer
                elif buffer.is_meta:
                    bare.append(name)
        if bare:
            raise InvalidSource(
                f"no file has these buffers, and they are on the meta device: {listed(bare)}. "
                "Build the module so that only its parameters are there (accelerate's "
                "init_empty_weights(include_buffers=False)), or make these buffers anew first"
            )

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slots]:
        """Return the slots by name of their tensor. Raises: InvalidSource."""
        matched: dict[str, Slots] = {}
        there = self._places(self.buffers.keys() & shapes.keys())
        missing = [n for n, b in self.buffers.items() if b.is_meta and self._owners[n] not in there]
        for slots in self._slots:
            name = next((n for n in slots.places if n in shapes), None)
            if name is None:
                missing.append(next(iter(slots.places)))
            else:
                matched[name] = slots
        if missing:
            others = sorted(shapes.keys() - self._owners.keys() - self._names())
            hint = f" The files also have {listed(others)}." if others else ""
            raise InvalidSource(
                f"the files do not have {listed(missing)}.{hint} Give prefix= or rename= if they "
                "have other names there; tie tied weights in the module, too (transformers: "
                "model.tie_weights())"
            )
        self._check_shapes(shapes, matched)
        return matched

    def _check_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], matched: Mapping[str, Slots]
    ) -> None:
        targets = self.buffers | {name: slots.parameter for name, slots in matched.items()}
        for name, shape in shapes.items():
            there = targets.get(name)
            if there is not None and tuple(there.shape) != shape:
                raise InvalidSource(
                    f"{name!r} has shape {shape} in the files, and {tuple(there.shape)} in the "
                    "module; build it with the configuration of the checkpoint"
                )

    def load_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Prepare the new values of buffers. All that can fail fails here."""
        for name, value in values.items():
            there = self.buffers[name]
            dtype = value.dtype if there.is_meta else there.dtype
            self._loaded[name] = value.to(self._device, dtype)
        loaded = self._places(values)
        for name, place in self._owners.items():
            if place not in loaded and self._buffer(name).device != self._device:
                self._loaded[name] = self._buffer(name).to(self._device)

    def say_unexpected(self, names: Collection[str]) -> None:
        unexpected = sorted(set(names) - self.buffers.keys() - self._names())
        if unexpected:
            log.warning("the module has no place for %s, which the files have", listed(unexpected))

    def finish(self) -> None:
        for name, value in self._loaded.items():
            there = self._buffer(name)
            if _takes(there, value):
                with torch.inference_mode(there.is_inference()), torch.no_grad():
                    there.copy_(value)
            else:
                owner, key = self._owners[name]
                setattr(owner, key, value)

    def _places(self, buffers: Iterable[str]) -> set[tuple[torch.nn.Module, str]]:
        """Return the places of buffers: one has several names if its module is there twice."""
        return {self._owners[name] for name in buffers}

    def _names(self) -> set[str]:
        return {name for slots in self._slots for name in slots.places}

    def _buffer(self, name: str) -> torch.Tensor:
        owner, key = self._owners[name]
        return owner.get_buffer(key)


def _takes(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value can be written into a buffer: not if several of its items share memory."""
    expanded = any(n > 1 and not s for n, s in zip(buffer.shape, buffer.stride(), strict=True))
    return (buffer.device, buffer.shape) == (value.device, value.shape) and not expanded


def _parameters(module: torch.nn.Module) -> list[Slots]:
    found: dict[int, Slots] = {}
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for key, parameter in sub.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{key}".lstrip(".")
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise InvalidSource(f"{name!r} has no shape yet; run the module once, then load")
            check_dense(name, parameter)
            if type(parameter) is not torch.nn.Parameter:
                raise InvalidSource(
                    f"{name!r} is a {type(parameter).__name__}; only plain parameters can be "
                    "loaded: load the module otherwise, then register it"
                )
            slots = found.setdefault(id(parameter), Slots(parameter))
            slots.places[name] = sub._parameters, key
    return list(found.values())
