"""What to keep on a device, what to stream, what to swap.

`sizes` says of what, `advise` weighs the ways, `paste` writes the settings. For stages of vLLM-Omni
`deploy` reads their file and `pipelines` their names, `claims` says what they want (`kv` and
`workspace` how much of it), `shares` divides a GPU among them, and `rounds` counts what their turns
move; `chunks` says in what chunks daemons are to lend. Pure but for reading files: nothing is
measured here, and no daemon is asked.
"""
