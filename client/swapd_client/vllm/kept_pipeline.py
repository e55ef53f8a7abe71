"""A start of a diffusion stage that reads no DiT, because the daemon has kept it.

As `kept_weights`, of the modules that vllm-omni's loader reads: the pipeline's `weights_sources`.
Encoders and VAEs, which the pipeline reads while it is built, are read at each start. Loading also
notes in the modules which of their layers are stacked: so it runs here too, over no weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

from swapd_client.log import log
from swapd_client.memory.sources import Source
from swapd_client.vllm.checkpoint import folder_of
from swapd_client.vllm.fingerprint import fingerprint, hashed, source_of
from swapd_client.vllm.kept_content import NotKept, has_any
from swapd_client.vllm.kept_start import KeptStart, files_in, machine, refuse_unfit
from swapd_client.vllm.options import KEY
from swapd_client.vllm.parts import Tensors

#: Where the classes of pipelines are that load only what their sources name.
_PIPELINES = "vllm_omni.diffusion.models."
#: Fields of vllm-omni's configuration that differ from start to start, or are in the key otherwise.
_LEFT_OUT = {"additional_config", "master_port", "nccl_port"}


class KeptPipeline(KeptStart):
    _LOADER = DiffusersPipelineLoader

    #: The modules that the loader reads, by their names' prefixes.
    _read: Mapping[str, Module] = {}

    def _key_now(self) -> str:
        config = self._worker.od_config
        if not (files := files_in(_folder(config))):
            return ""
        more: Mapping[str, object] = config.additional_config or {}
        said = {one.name: repr(getattr(config, one.name)) for one in fields(config)}
        made_from = (
            *machine(self._worker),
            [(name, said[name]) for name in sorted(said.keys() - _LEFT_OUT)],
            {name: value for name, value in more.items() if name != KEY},
            files,
        )
        return hashed(repr(made_from).encode())

    def _load(self, read: partial[None], loader: Any, model: Any) -> None:
        if self._begun or read.keywords:
            self._key = ""
        self._begun += 1
        if not self._key:
            return read()
        self.is_unread = self._is_kept(loader, model)
        if self.is_unread:
            log.info("%s reads no DiT: swapd has kept it", self._name)
            return
        with _noting(model) as names:
            read()
        self._print(loader, model)
        if self._key and not (names and all(name.startswith(tuple(self._read)) for name in names)):
            self._give_up(NotKept("its sources do not tell which weights it loads"))

    def source(self, processor: Any) -> Callable[[Tensors], Source]:
        """Return what names components of weights that were, or would have been, read.

        Raises: NotKept, also when it is called.
        """
        if (content := self.content(self._read)) is None and self.is_unread:
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
        if not has_any(self._status().kept, self._key):
            return False
        self._tried(partial(self._load_nothing, loader, model))
        return super()._is_kept(loader, model)

    def _load_nothing(self, loader: Any, model: Any) -> None:
        for module in self._sources(loader, model).values():
            if callable(load := getattr(module, "load_weights", None)):
                load(iter(()))

    def _fingerprint(self, loader: Any, model: Any) -> str:
        self._read = self._sources(loader, model)
        of_class = f"{type(model).__qualname__} {source_of(type(model))}"
        return hashed(f"{of_class} {fingerprint(self._read)}".encode())

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
            refuse_unfit(module)
            if any(one.is_meta for one in module.parameters()):
                raise NotKept(f"{source.prefix} gets its parameters while it is read")
        return found


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


def _folder(config: Any) -> Path:
    for name in ("lora_path", "custom_pipeline_args"):
        if getattr(config, name):
            raise NotKept(name)
    if (folder := folder_of(config.model, config.revision)) is None:
        raise NotKept("a model that is neither in a folder nor in Hugging Face's cache")
    return folder
