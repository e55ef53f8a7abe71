"""The web page and `/metrics`: a separate process that watches one daemon, as its client, and
changes nothing.

A thread in the daemon would take the GIL from its loop, for 5 ms at a time. In a process of its
own, slow readers, a thousand connections and any HTTP input cost the daemon only one `status` a
second, or two while a page is open. The daemon starts the process (`swapd.cli.page`), restarts it
if it ends, and ends it.
"""
