"""Importing this has stages believe that their weights are kept, as where they go just then."""

from unittest.mock import patch

patch("swapd_client.vllm.kept_start.has_all", lambda *_: True).start()
