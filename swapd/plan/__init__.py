"""Plans which components to keep on a device, to stream and to swap.

`sizes` measures components, `advice` compares treatments, `snippets` writes settings. For stages of
vLLM-Omni, `deploy` reads their file, `omni` asks vLLM-Omni for their names, `claims` computes their
`demands` (with `kv`), and `shares` divides a GPU among them. `arena` counts the bytes that their
turns move; `chunks` chooses the daemons' chunk size. Nothing here runs a measurement or asks a
daemon.
"""
