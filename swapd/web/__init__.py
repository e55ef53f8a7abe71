"""The web page and `/metrics`: a process of its own that watches one daemon, as its client.

Not in the daemon's process: a thread there would take the GIL from its loop, 5 ms at a time, for
each garbage it parses and each page it renders. Here slow readers, a thousand connections and
whatever comes by HTTP cost the daemon nothing: all it does is to write the swap log's stream to one
more subscriber, which it never waits for (`swapd.daemon.publisher`), and to answer a `status` now
and then. The process runs nicer than the daemon, is started by it (`swapd.cli.page`), started anew
if it ends, and ends with it. It shows what the records say, and changes nothing.
"""
