"""Tensors and accesses that escape from a module: held views, unseen writes, absent reads, forks.

Each case that must end in a segmentation fault runs in a process of its own.
"""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from swapd_client import Client
from tests.guarantees.harness import Daemon
from tests.offload.modules import evict
from tests.offload.nursery import Nursery
from tests.offload.twins import Lent

#: `module` is lent, and absent.
PREPARE = """
    import torch
    from torch import nn
    from swapd_client import connect
    from swapd_client.offload.guards import guard
    from swapd_client.offload.weights import ComponentWeights

    client = connect({folder!r}, label="child")
    module = nn.Linear(64, 64)
    early = module.weight.detach()
    client.register("child", module)
    weights = ComponentWeights(client, "child", [client.session.own("child")])
    guard(module, weights, lambda undo: None)
    weight = module.weight
"""


class Child:
    """Lends a module in a process of its own."""

    def __init__(self, nursery: Nursery, daemon: Daemon) -> None:
        self._nursery = nursery
        self._prepare = PREPARE.format(folder=str(daemon.folder))

    def run(self, *lines: str) -> tuple[int, str]:
        """The exit status and output of a process that runs these lines."""
        after = "".join(f"    {line}\n" for line in (*lines, "client.close()"))
        return self._nursery.run(self._prepare + after)

    def faults(self, *lines: str) -> bool:
        """Whether these lines end in a fault, the last of them, and not before."""
        status, said = self.run(*lines[:-1], "print('reached', flush=True)", lines[-1])
        assert "reached" in said
        return status == -signal.SIGSEGV


@pytest.fixture
def child(nursery: Nursery, daemon: Daemon) -> Child:
    return Child(nursery, daemon)


# --- while it is out ---------------------------------------------------------------------


def test_what_a_module_says_of_itself_is_what_it_was(client: Client) -> None:
    lent = Lent(client, lambda: nn.Sequential(nn.Linear(4, 3), nn.Embedding(5, 2)))
    assert repr(lent.module) == repr(lent.twin)
    for mine, its in zip(lent.module.parameters(), lent.twin.parameters(), strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
        assert (mine.stride(), mine.numel(), mine.nbytes) == (its.stride(), its.numel(), its.nbytes)
        assert mine.requires_grad == its.requires_grad
    assert next(lent.module.parameters()).device == torch.device("cpu")
    assert sum(p.numel() for p in lent.module.parameters()) == 15 + 10
    assert lent.is_out()


READS = {
    "repr": "repr(weight)",
    "item": "weight[0, 0].item()",
    "compute": "weight + 1",
    "call": "module(torch.ones(64))",
    "tolist": "weight.tolist()",
    "clone": "weight.clone()",
    "numpy": "weight.detach().numpy().sum()",
    "half": "weight.half()",
}


@pytest.mark.parametrize("which", READS)
def test_reading_a_tensor_that_is_out_is_a_fault(child: Child, which: str) -> None:
    assert child.faults(READS[which])


def test_in_a_lease_none_of_these_is(child: Child) -> None:
    status, _ = child.run("with client.acquire('child'):", *map("    {}".format, READS.values()))
    assert status == 0


VIEWS = {
    "data": "held = weight.data",
    "detach": "held = weight.detach()",
    "slice": "held = weight[3:5]",
    "numpy": "held = torch.from_numpy(weight.detach().numpy())",
    "dlpack": "held = torch.from_dlpack(weight.detach())",
    "kept": "held = module.state_dict(keep_vars=True)['weight']",
}


@pytest.mark.parametrize("which", VIEWS)
def test_a_view_that_is_held_faults_once_it_is_out(child: Child, which: str) -> None:
    """The view does not keep the memory: that is another component's by then."""
    assert child.faults("with client.acquire('child'):", f"    {VIEWS[which]}", "held.sum()")


def test_a_state_dict_that_is_held_does_not(child: Child) -> None:
    take = "held = module.state_dict()['weight']"
    status, _ = child.run("with client.acquire('child'):", f"    {take}", "held.sum()")
    assert status == 0


def test_a_view_that_is_held_keeps_no_memory_of_the_device(client: Client) -> None:
    lent = Lent(client, lambda: nn.Linear(512, 512))
    with client.acquire("m"):
        held = lent.module.get_parameter("weight").data
    evict(client, "m")
    assert client.status().used_bytes == 0
    with client.acquire("m"):
        assert torch.equal(held, lent.twin.get_parameter("weight"))


# --- writes ------------------------------------------------------------------------------

WRITES = {
    "in place": "with torch.no_grad(): weight.add_(1)",
    "data": "weight.data.fill_(1)",
    "copy": "with torch.no_grad(): weight.copy_(torch.ones(64, 64))",
    "slice": "weight.data[0, 0] = 1",
    "numpy": "weight.detach().numpy().fill(1)",
    "dlpack": "torch.from_dlpack(weight.detach()).fill_(1)",
    "a view of the whole": "torch.as_strided(weight.detach(), (1,), (1,)).fill_(1)",
    "out=": "torch.ones(64, 64, out=weight.detach())",
    "optimizer": "[setattr(weight, 'grad', torch.ones(64, 64)), "
    "torch.optim.SGD([weight], lr=1.0, foreach=False).step()]",
}


@pytest.mark.parametrize("which", WRITES)
def test_a_write_to_clean_weights_is_a_fault_even_in_a_lease(child: Child, which: str) -> None:
    assert child.faults("lease = client.acquire('child')", WRITES[which])


@pytest.mark.parametrize("which", WRITES)
def test_a_write_to_mutable_weights_is_kept(client: Client, which: str) -> None:
    lent = Lent(client, lambda: nn.Linear(64, 64), mutable=True)
    for module in (lent.module, lent.twin):
        with client.acquire("m"):
            exec(WRITES[which], {"torch": torch, "weight": module.weight})
    evict(client, "m")
    assert torch.equal(lent.module.state_dict()["weight"], lent.twin.state_dict()["weight"])


def test_who_kept_the_old_storage_writes_to_that(child: Child) -> None:
    """A tensor made before the registration still has the old memory."""
    status, said = child.run(
        "before = module.state_dict()['weight'].clone()",
        "early.fill_(7)",
        "with client.acquire('child'):",
        "    print(torch.equal(weight, before))",
    )
    assert (status, said) == (0, "True\n")


# --- fork --------------------------------------------------------------------------------


def test_a_forked_child_is_told_that_it_has_no_weights(child: Child) -> None:
    """Code that reads the host copy works there: it maps it again."""
    status, said = child.run(
        "import os",
        "from swapd_client import ClientClosed",
        "child = os.fork()",
        "if child == 0:",
        "    try:",
        "        client.acquire('child')",
        "    except ClientClosed as exc:",
        "        print('refused', flush=True)",
        "    os._exit(len(module.state_dict()))",
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)",
        "with client.acquire('child'): print(tuple(module(torch.ones(64)).shape))",
    )
    assert (status, said.split("\n")) == (0, ["refused", "2", "(64,)", ""])


def test_a_model_that_a_forked_child_drops_stays_with_its_parent(
    daemon: Daemon, nursery: Nursery
) -> None:
    program = Path(__file__).parent / "programs" / "dropped_in_a_child.py"
    assert nursery.run(program, daemon.folder) == (0, "3\n")
