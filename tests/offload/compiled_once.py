"""To be imported by a nursery: compilations are quick in what it starts.

What torch imports at a first one it has imported then. And it measures no guards: for a metric that
nobody reads here it flushes the caches of the processor, 40 ms for each graph.
"""

import torch
from torch._dynamo import guards

vars(guards)["profile_guard_manager"] = lambda *_: 0.0
torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))
torch._dynamo.reset()
