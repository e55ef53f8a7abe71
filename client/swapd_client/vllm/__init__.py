"""swapd's plugin for vLLM and vllm-omni, which call `register` in every process they start.

All else is in the worker classes that a stage's configuration names: `worker_cls` is
`omni.ARWorker`, `omni.GenerationWorker` or, for vLLM alone, `worker.Worker`; `worker_extension_cls`
is `diffusion.DiffusionExtension`. This module imports neither vLLM nor torch.
"""

import logging

from swapd_client.log import log
from swapd_client.vllm import versions


def register() -> None:
    """Send the client's log to vLLM's handlers, and warn of unsupported versions.

    Cheap and idempotent. Never raises: a worker that cannot run raises its own error.
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
