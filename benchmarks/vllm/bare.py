"""A worker whose calls can run with the plugin around them, and without."""

from contextlib import ExitStack

from swapd_client.vllm.cpu import CPUWorker
from swapd_client.vllm.worker import Leased


class Worker(CPUWorker):
    """The plugin's worker, on a CPU."""

    #: The lease for calls without the plugin.
    _held = ExitStack()

    def bare(self, on: bool) -> None:
        """Use vLLM's own `execute_model` and `sample_tokens`, or the plugin's again."""
        self._held.close()
        for name in ("execute_model", "sample_tokens"):
            self.__dict__.pop(name, None)
            if on:
                setattr(self, name, getattr(super(Leased, self), name))
        if on:
            self._held = ExitStack()
            self._held.enter_context(self._swapd.using())
