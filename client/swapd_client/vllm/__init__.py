"""swapd in vLLM and vllm-omni: worker classes that a stage's configuration names.

vLLM and vllm-omni call `register` in every process they start. All else is in the worker class
that `worker_cls` (AR and generation stages) or `worker_extension_cls` (diffusion stages) names:
`omni.ARWorker`, `omni.GenerationWorker`, `diffusion.DiffusionExtension`, and `worker.Worker` for
vLLM alone. Nothing of vLLM is changed. This module imports neither vLLM nor torch.
"""

import logging

from swapd_client.vllm import versions

log = logging.getLogger("swapd_client")


def register() -> None:
    """Have swapd's client log where vLLM does, and warn of versions that it does not support.

    The entry point of the plugin. Cheap; called more than once, does nothing more. Never raises:
    a worker that cannot run says so itself.
    """
    _log_with_vllm()
    try:
        versions.check()
    except versions.UnsupportedVersion as exc:
        log.warning("%s", exc)


def _log_with_vllm() -> None:
    vllm = logging.getLogger("vllm")
    if log.handlers or not vllm.handlers:  # somebody has said where it goes
        return
    log.handlers = list(vllm.handlers)
    log.setLevel(vllm.level)
    log.propagate = False
