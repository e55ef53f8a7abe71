"""Private tensors with the bytes of components, whether these are on the device or not.

A clean component's bytes are in its host copy, so reading it needs no lease and no device memory:
the copies are a private mapping of the host copy, whose pages are copied on write. A mutable
component's latest bytes may be on the device only: they are copied under a lease.
"""

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from swapd.shared import vm
from swapd_client.memory.part import Part
from swapd_client.memory.tensors import inner_names, is_wrapper, view
from swapd_client.session.session import Session

#: Memory that is freed with the last tensor over it.
_Memory = ctypes.Array[ctypes.c_ubyte]


def start_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):  # sparse, fake, uninitialised
        return 0


class Copies:
    """Copies that belong together: tensors on one storage get copies on one storage.

    Each copy has a storage on the CPU with its own bytes only, used by no other tensor.
    """

    def __init__(
        self,
        session: Session,
        find: Callable[[int], Part | None],
        hold: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """`find(address)`: the component there. `hold()`: a lease on all that `find` returns."""
        self._session = session
        self._find = find
        self._hold = hold
        #: The mapped host copies, by component; None if the component has been unregistered.
        self._masters: dict[str, _Memory | None] = {}
        #: By the address of the original storage.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A private copy of a tensor; a wrapper is copied around copies of its inner tensors.

        A tensor outside all components is returned itself, detached. Blocks for a lease if the
        component is mutable, and raises as `Client.acquire`.
        """
        with torch.inference_mode(False), torch.no_grad():
            if is_wrapper(tensor):
                return self._of_wrapper(tensor)
            part = self._find(start_of(tensor))
            if part is None:
                return tensor.detach()
            storage = self._storage(part, tensor.untyped_storage())
            place = int(tensor.storage_offset()) * tensor.element_size()
            return view(storage, place, tensor)

    def _of_wrapper(self, tensor: torch.Tensor) -> torch.Tensor:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
        inner |= {name: self.of(inner[name]) for name in inner_names(tensor)}
        copy: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, tensor.size(), tensor.stride()
        )
        return copy

    def _storage(self, part: Part, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage.data_ptr()
        if key not in self._storages:
            if part.mutable:
                with self._hold():
                    copied = _copied(storage)
            elif (master := self._master(part)) is not None:
                copied = torch.frombuffer(
                    master, dtype=torch.uint8, offset=key - part.address, count=storage.nbytes()
                )
            else:
                copied = _copied(storage)
            self._storages[key] = copied.untyped_storage()
        return self._storages[key]

    def _master(self, part: Part) -> _Memory | None:
        if part.name not in self._masters:
            self._masters[part.name] = self._mapped(part)
        return self._masters[part.name]

    def _mapped(self, part: Part) -> _Memory | None:
        address = self._session.registry.map_master(part)
        if address is None:
            return None
        memory = (ctypes.c_ubyte * part.span).from_address(address)
        weakref.finalize(memory, vm.free, address, part.span).atexit = False
        return memory


def _copied(storage: torch.UntypedStorage) -> torch.Tensor:
    """A copy of bytes that are readable now."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage).to("cpu", copy=True)
