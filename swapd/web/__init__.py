"""The web page and `/metrics`: a separate process that watches one daemon, as its client.

It is not in the daemon's process: a thread there would take the GIL from its loop, for 5 ms at a
time, to parse garbage and render pages. Here slow readers, a thousand connections and any HTTP
input cost the daemon nothing. The daemon only writes the swap log's stream to one more subscriber,
for which it never waits (`swapd.daemon.publisher`), and answers a `status` now and then. The
process runs nicer than the daemon, which starts it (`swapd.cli.page`), restarts it if it ends, and
ends it. It shows the contents of the records, and changes nothing.
"""
