"""Plans which components to keep on a device, to stream and to swap.

`sizes` measures components, `advise` compares the treatments, `paste` writes the settings. For
stages of vLLM-Omni, `deploy` reads their file, and `omni` asks for their names. `claims` computes
their `demands` (with `kv`), and `shares` divides a GPU among them. `arena` counts
the bytes that their turns move; `chunks` chooses the daemons' chunk size. It measures nothing, and
asks no daemon.
"""
