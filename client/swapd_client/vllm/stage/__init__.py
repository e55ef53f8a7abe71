"""What a worker process of a stage has with swapd, each concept by itself; `Stage` is their face.

Neither this package nor what it imports may import vLLM.
"""

from swapd_client.vllm.stage.stage import Stage

__all__ = ["Stage"]
