"""The web page and `/metrics`: a separate process that watches one daemon, as its client.

It is not in the daemon's process: a thread there would take the GIL from its loop, for 5 ms at a
time, to parse garbage and render pages. Here slow readers, a thousand connections and any HTTP
input cost the daemon nothing but a `status` a second, or two while a page is open. The process runs
nicer than the daemon, which starts it (`swapd.cli.page`), restarts it if it ends, and ends it. It
shows the status and the last records of the swap log's file, and changes nothing.
"""
