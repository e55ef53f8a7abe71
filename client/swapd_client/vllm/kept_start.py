"""What all starts that read no weights have in common: see `kept_weights` and `kept_pipeline`."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch.nn import Module
from vllm import envs
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

import swapd_client
from swapd.shared.protocol import Status
from swapd_client.errors import InvalidSource
from swapd_client.log import log
from swapd_client.vllm.fingerprint import fingerprint
from swapd_client.vllm.kept_content import Content, NotKept, has_all
from swapd_client.vllm.kernel_tensors import found_in, packed_bytes
from swapd_client.weights.safetensors import File

#: To be increased when the plugin makes other bytes of the same files.
READER = 1
#: Most files of a model's folder.
_FILES = 10_000

_PACKAGES = ("vllm", "vllm_omni", "torch", "transformers", "triton", "flashinfer")

T = TypeVar("T")


class KeptStart(ABC):
    """What a process knows of the weights that it loads, and whether it reads them.

    A model that does not suit is read: no method raises for it.
    """

    #: The class whose `load_weights` reads them.
    _LOADER: ClassVar[Any]

    def __init__(self, name: str, worker: Any, status: Callable[[], Status]) -> None:
        self._name = name
        self._worker = worker
        self._status = status
        #: "": the weights are not kept.
        self._key = self._key_now()
        self._loaded = ""
        self.is_unread = False
        #: Models that have begun to load.
        self._begun = 0

    @classmethod
    def of(cls, name: str, worker: Any, status: Callable[[], Status], *more: Any) -> Self | None:
        """None: no weights of this stage are kept."""
        if not status().keep_host_bytes:
            return None
        try:
            return cls(name, worker, status, *more)
        except Exception as exc:  # noqa: BLE001 - of any model: it starts without this
            why = _said(exc)
            log.info("%s reads its files at each start, whatever swapd keeps: %s", name, why)
            return None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In the block, the loader reads no weights that are kept."""
        read = self._LOADER.load_weights

        def load(loader: Any, model: Any, *given: Any, **named: Any) -> None:
            self._load(partial(read, loader, model, *given, **named), loader, model)

        self._LOADER.load_weights = load
        try:
            yield
        finally:
            self._LOADER.load_weights = read

    @abstractmethod
    def _key_now(self) -> str:
        """Return a hash of all that the weights are made from; "" shortly after a file was written.

        Raises: NotKept, InvalidSource, OSError.
        """

    @abstractmethod
    def _load(self, read: partial[None], loader: Any, model: Any) -> None:
        """Load the weights of `model`; `read` has the loader do it."""

    @abstractmethod
    def _fingerprint(self, loader: Any, model: Any) -> str:
        """Return the fingerprint of what is read. Raises: NotKept, UnhashableState."""

    def _is_kept(self, loader: Any, model: Any) -> bool:
        self._print(loader, model)
        return bool(self._loaded) and has_all(self._status().kept, self._key, self._loaded)

    def _print(self, loader: Any, model: Any) -> None:
        """Take the fingerprint of what is read, before or after it is."""
        printed = partial(self._fingerprint, loader, model)
        self._loaded = (self._tried(printed) if self._key else None) or ""

    def _tried(self, take: Callable[[], T]) -> T | None:
        """Return `take()`. If it raises, the weights are not kept."""
        try:
            return take()
        except Exception as exc:  # noqa: BLE001 - as in `of`
            self._give_up(exc)
            return None

    def _give_up(self, why: Exception) -> None:
        log.info("the weights of %s cannot be kept: %s", self._name, _said(why))
        self._key = self._loaded = ""

    def content(self, models: Mapping[str, Module]) -> Content | None:
        """Return the weights' name for the daemon; None: they are not kept.

        They have no name if their files changed meanwhile, or so lately that a write may not show.
        """
        if not self._key or not self._loaded:
            return None
        if not self.is_unread and packed_bytes(models, found_in(models)):
            return None
        return self._tried(partial(self._content, models))

    def _content(self, models: Mapping[str, Module]) -> Content | None:
        if self._key_now() != self._key:
            return None
        return Content(self._key, self._loaded, fingerprint(models), self.is_unread)


def _said(why: Exception) -> str:
    return str(why) if isinstance(why, NotKept) else repr(why)


def refuse_unfit(model: Module) -> None:
    """Raises: NotKept, if a layer would not be complete without its processing."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            raise NotKept(f"{name} has a {type(method).__name__}")


def machine(worker: Any) -> tuple[object, ...]:
    """Return what makes weights beside a model's files and settings."""
    return (
        READER,
        swapd_client.__version__,
        {name: getattr(sys.modules.get(name), "__version__", "") for name in _PACKAGES},
        f"{type(worker).__module__}.{type(worker).__qualname__}",
        *(worker.rank, _device(worker.device)),
        sorted((name, repr(value)) for name, value in envs.compile_factors().items()),
    )


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def files_in(folder: Path | None) -> list[tuple[str, tuple[int, ...]]]:
    """Return path and identity of all files; none shortly after one of them was written."""
    found, settled = [], True
    for where, _, names in os.walk(folder or "", followlinks=True):
        for name in names:
            with closing(File(Path(where, name))) as file:
                found.append((str(file.path), file.identity))
                settled &= file.is_settled
            if len(found) > _FILES:
                raise InvalidSource(f"{folder} has more than {_FILES} files")
    return sorted(found) if settled else []
