"""The log of the client and of its plugin, under one name."""

import logging

log = logging.getLogger("swapd_client")
