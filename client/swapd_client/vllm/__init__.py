"""swapd in vLLM and vllm-omni: worker classes that a stage's configuration names.

vLLM and vllm-omni call `register` in every process they start. All other code is in the worker
class that `worker_cls` (AR and generation stages) or `worker_extension_cls` (diffusion stages)
names: `omni.ARWorker`, `omni.GenerationWorker`, `diffusion.DiffusionExtension`, and `worker.Worker`
for vLLM alone. swapd changes nothing of vLLM. This module imports neither vLLM nor torch.
"""

import logging

from swapd_client.vllm import versions

log = logging.getLogger("swapd_client")


def register() -> None:
    """Send the client's log to vLLM's handlers, and warn of unsupported versions.

    The entry point of the plugin. Cheap, and idempotent. Never raises: a worker that cannot run
    raises its own error.
    """
    _log_with_vllm()
    try:
        versions.check()
    except versions.UnsupportedVersion as exc:
        log.warning("%s", exc)


def _log_with_vllm() -> None:
    vllm = logging.getLogger("vllm")
    if log.handlers or not vllm.handlers:  # the program has configured this logger
        return
    log.handlers = list(vllm.handlers)
    log.setLevel(vllm.level)
    log.propagate = False
