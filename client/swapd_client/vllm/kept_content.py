"""The name of a stage's weights, under which the daemon may keep their host copies.

A stage that starts asks for host copies by the first two parts of the name. If the daemon has them,
the stage builds its model without reading, and registers it under the whole name.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from swapd.shared.protocol import KeptStatus
from swapd_client.memory.layout import Ready
from swapd_client.memory.tensors import TensorLayout
from swapd_client.vllm.parts import Tensors


class NotKept(Exception):
    """The daemon has not kept the bytes of a model that was built without reading."""


class Content(NamedTuple):
    #: Hash of everything that vLLM makes the weights from.
    key: str
    #: Fingerprints of the model, after its weights are loaded and after they are processed.
    loaded: str
    processed: str
    #: Whether its parameters have no bytes here, only in the daemon.
    is_unread: bool

    def layout_of(self, tensors: Tensors, parts: int, processor: Any) -> "KeptLayout":
        """`parts`: the components of the model have at least so many such layouts together."""
        name = f"{prefix(self.key, self.loaded)}{self.processed}:{parts}"
        layout = KeptLayout(tensors, gpu=processor.index, fetch=processor.fetch)
        layout.name, layout.is_unread = name, self.is_unread
        return layout


def prefix(key: str, loaded: str) -> str:
    return f"stage:{key}:{loaded}:"


def has_any(kept: Iterable[KeptStatus], key: str) -> bool:
    return any(one.content.startswith(f"stage:{key}:") for one in kept)


def has_all(kept: Iterable[KeptStatus], key: str, loaded: str) -> bool:
    found = Counter(one.content for one in kept)
    mine = (name for name in found if name.startswith(prefix(key, loaded)))
    return any(found[name] >= int(name.rpartition(":")[2]) for name in mine)


class KeptLayout(TensorLayout, Ready):
    """The weights of a component, under a name for which the stage vouches."""

    name: str
    is_unread: bool

    def guess(self) -> None:
        self.content, self.certain = self.name, True

    def fill_file(self, fd: int) -> None:
        self._check_read()
        super().fill_file(fd)

    def matches(self, fd: int) -> bool:
        self._check_read()
        return super().matches(fd)

    def _check_read(self) -> None:
        if self.is_unread:
            raise NotKept("the daemon has not kept its weights as they would be now")
