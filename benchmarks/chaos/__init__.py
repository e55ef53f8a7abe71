"""Workers that do all there is to do, and are killed and stopped as they do it; so is the daemon.

`book` knows which bytes each component must have; `worker` and `looper` use threads and an event
loop; `counts` survive whoever counts; `__main__` kills, stops, starts again, and adds up.
"""
