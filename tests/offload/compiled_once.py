"""Imported by a nursery, so that compilations in its children are quick.

The first compilation imports modules of torch: the children inherit them. Guards are not measured:
for that metric, unused here, torch flushes the processor's caches, 40 ms for each graph.
"""

import torch
from torch._dynamo import guards

vars(guards)["profile_guard_manager"] = lambda *_: 0.0
torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))
torch._dynamo.reset()
