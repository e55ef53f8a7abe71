"""A stage that waits for a busy machine. Importing this changes all stages of this process.

A stage that takes no step for a moment gives way to others, in the middle of a request, too. On a
busy machine any engine stands still for a moment, at any time. With this one a turn ends where its
rules end it, and at a step that computes nothing.
"""

from swapd_client.vllm.stage import turns

turns.IDLE_S = 60.0
