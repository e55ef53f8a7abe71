"""Stages that wait for a busy machine. Importing this changes all stages of this process.

A stage that takes no step for a moment gives way to others, even in the middle of a request. On a
busy machine any engine may pause for a moment. With this module a turn ends only where its rules
end it, and at a step that computes nothing.
"""

from swapd_client.vllm.stage import turns

turns.IDLE_S = 60.0
