"""A start of a diffusion stage that reads no DiT, because the daemon has kept it.

As `kept_weights`, of the modules that vllm-omni's loader reads: the pipeline's `weights_sources`.
Encoders and VAEs, which the pipeline reads while it is built, are read at each start. Loading also
notes in the modules which of their layers are stacked: so it runs here too, over no weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

from swapd.shared.protocol import Status
from swapd_client.log import log
from swapd_client.memory.sources import Source
from swapd_client.vllm.checkpoint import folder_of
from swapd_client.vllm.fingerprint import fingerprint, hashed, source_of
from swapd_client.vllm.kept_content import Content, NotKept, has_all, has_any
from swapd_client.vllm.kept_weights import files_in, machine, unfit
from swapd_client.vllm.kernel_tensors import found_in, packed_bytes
from swapd_client.vllm.options import KEY
from swapd_client.vllm.parts import Tensors

#: Where the classes of pipelines are that load only what their sources name.
_PIPELINES = "vllm_omni.diffusion.models."
#: Fields of vllm-omni's configuration that differ from start to start, or are in the key otherwise.
_LEFT_OUT = {"additional_config", "master_port", "nccl_port"}


class KeptPipeline:
    def __init__(self, name: str, worker: Any, status: Callable[[], Status]) -> None:
        self._name = name
        self._worker = worker
        self._status = status
        self._key = key_of(worker)
        self._loaded = ""
        self._begun = False
        self.is_unread = False
        #: The modules that the loader reads, by their names' prefixes.
        self._read: dict[str, Module] = {}

    @classmethod
    def of(cls, name: str, worker: Any, status: Callable[[], Status]) -> "KeptPipeline | None":
        """None: nothing of this stage is kept."""
        if not status().keep_host_bytes:
            return None
        try:
            return cls(name, worker, status)
        except Exception as exc:  # noqa: BLE001 - of any model: it starts without this
            log.info("%s reads its files at each start, whatever swapd keeps: %r", name, exc)
            return None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In the block, vllm-omni reads no weights that are kept."""
        read = DiffusersPipelineLoader.load_weights

        def load(loader: Any, model: Any, **more: Any) -> None:
            self._load(read, loader, model, more)

        DiffusersPipelineLoader.load_weights = load
        try:
            yield
        finally:
            DiffusersPipelineLoader.load_weights = read

    def _load(
        self, read: Callable[..., None], loader: Any, model: Any, more: Mapping[str, Any]
    ) -> None:
        if self._begun or more:
            self._key = ""
        self._begun = True
        if not self._key:
            return read(loader, model, **more)
        self.is_unread = self._is_kept(loader, model)
        if self.is_unread:
            log.info("%s reads no DiT: swapd has kept it", self._name)
            return
        with _noting(model) as names:
            read(loader, model)
        self._loaded = self._printed(loader, model)
        if self._key and not (names and all(name.startswith(tuple(self._read)) for name in names)):
            self._give_up("its sources do not tell which weights it loads")

    def content(self) -> Content | None:
        """Return the weights' name for the daemon; None: they are not kept, as
        `KeptWeights.content`."""
        if not self._key or not self._loaded:
            return None
        if not self.is_unread and packed_bytes(self._read, found_in(self._read)):
            return None
        try:
            if key_of(self._worker) == self._key:
                printed = fingerprint(self._read)
                return Content(self._key, self._loaded, printed, self.is_unread)
        except Exception as exc:  # noqa: BLE001 - as above
            log.info("the weights of %s cannot be kept: %r", self._name, exc)
        return None

    def source(self, processor: Any) -> Callable[[Tensors], Source]:
        """Return what names components of weights that were, or would have been, read.

        Raises: NotKept, also when it is called.
        """
        if (content := self.content()) is None and self.is_unread:
            raise NotKept("its files have changed meanwhile")
        mine = {
            id(one): name
            for path, module in self._read.items()
            for name, one in module.named_parameters(prefix=path)
        }

        def named(tensors: Tensors) -> Source:
            read = [mine.get(id(tensor)) for tensor in tensors.values()]
            if content is not None and all(read):
                # two DiTs of one kind have the same layout
                which = hashed(repr(read).encode())
                its = content._replace(processed=f"{content.processed}.{which}")
                return its.layout_of(tensors, 1, processor)
            if self.is_unread and any(read):
                raise NotKept("a component has weights that were read, and others")
            return tensors

        return named

    def _is_kept(self, loader: Any, model: Any) -> bool:
        kept = self._status().kept
        if not has_any(kept, self._key):
            return False
        try:
            for module in self._sources(loader, model).values():
                if callable(load := getattr(module, "load_weights", None)):
                    load(iter(()))
        except Exception as exc:  # noqa: BLE001 - as above
            self._give_up(repr(exc))
            return False
        self._loaded = self._printed(loader, model)
        return bool(self._loaded) and has_all(kept, self._key, self._loaded)

    def _printed(self, loader: Any, model: Any) -> str:
        """Return the fingerprint of what is read; "": it is not kept."""
        try:
            self._read = self._sources(loader, model)
            of_class = f"{type(model).__qualname__} {source_of(type(model))}"
            return hashed(f"{of_class} {fingerprint(self._read)}".encode())
        except Exception as exc:  # noqa: BLE001 - as above
            self._give_up(repr(exc))
            return ""

    def _sources(self, loader: Any, model: Any) -> dict[str, Module]:
        if not type(model).__module__.startswith(_PIPELINES):
            raise NotKept(f"{type(model).__qualname__} may read other files")
        found = {}
        for source in loader._get_weight_sources(model):
            config = self._worker.od_config
            where = source.model_or_path, source.revision or config.revision
            if where != (config.model, config.revision):
                raise NotKept(f"{source.prefix} is read from {source.model_or_path}")
            module = found[source.prefix] = model.get_submodule(source.prefix.rstrip("."))
            if (why := unfit(module)) or any(one.is_meta for one in module.parameters()):
                raise NotKept(why or f"{source.prefix} gets its parameters while it is read")
        return found

    def _give_up(self, why: str) -> None:
        log.info("the weights of %s cannot be kept: %s", self._name, why)
        self._key = ""


@contextmanager
def _noting(model: Any) -> Iterator[set[str]]:
    """In the block, note the names that the pipeline says it has loaded; none if it does not."""
    load, names = model.load_weights, set[str]()

    def noted(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        said: set[str] | None = load(weights)
        names.update(said or ())
        return said

    model.load_weights = noted
    try:
        yield names
    finally:
        del model.load_weights


def key_of(worker: Any) -> str:
    """Return a hash of all that vllm-omni makes the weights from; "" shortly after a file was
    written.

    Raises: NotKept, InvalidSource, OSError.
    """
    config = worker.od_config
    if not (files := files_in(_folder(config))):
        return ""
    more: Mapping[str, object] = config.additional_config or {}
    said = {one.name: repr(getattr(config, one.name)) for one in fields(config)}
    made_from = (
        *machine(worker),
        [(name, said[name]) for name in sorted(said.keys() - _LEFT_OUT)],
        {name: value for name, value in more.items() if name != KEY},
        files,
    )
    return hashed(repr(made_from).encode())


def _folder(config: Any) -> Path:
    for name in ("lora_path", "custom_pipeline_args"):
        if getattr(config, name):
            raise NotKept(name)
    if (folder := folder_of(config.model, config.revision)) is None:
        raise NotKept("a model that is neither in a folder nor in Hugging Face's cache")
    return folder
