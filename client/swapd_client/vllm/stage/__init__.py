"""The state of a stage's worker process, one file for each concept; `Stage` combines them.

Neither this package nor its imports may import vLLM.
"""

from swapd_client.vllm.stage.stage import Stage

__all__ = ["Stage"]
