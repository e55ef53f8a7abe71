"""What is dropped, or ends, in a forked child is the child's own, and nothing of its parent's.

A child has other memory at the addresses that were not inherited, and other files at the numbers of
descriptors that it closed; and its parent's connections are not its own to speak through.
"""

from collections.abc import Callable, Iterator
from textwrap import dedent

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.nursery import Nursery

PREPARE = """
import ctypes
import gc
import os
import signal
import threading
import traceback
import torch
from torch import nn
from swapd.shared import vm
from swapd_client import connect
from tests.offload.modules import TOKENS, Encoder, evict, seeded

torch.set_grad_enabled(False)
client = connect({folder!r}, label="child")


def in_a_child(run):
    '''Fork; the child must run this, and end, within 20 s.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        status = 1
        try:
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, os.waitstatus_to_exitcode(status)


def mapped(address, nbytes):
    '''Other memory there, with something in it.'''
    vm.map_anonymous(nbytes, at=address)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    ctypes.memset(address, 7, nbytes)
    return memory


def held():
    return {{c.name: c.leases for c in client.status().components if c.leases}}


"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("tests.offload.modules")
    yield nursery
    nursery.close()


Run = Callable[[str], None]


@pytest.fixture
def run(nursery: Nursery, daemon: Daemon) -> Run:
    def run(program: str) -> None:
        status, said = nursery.run(PREPARE.format(folder=str(daemon.folder)) + dedent(program))
        assert status == 0, said

    return run


def test_a_client_dropped_in_a_child_unmaps_nothing_there(run: Run) -> None:
    run("""
        from swapd.shared.board import BOARD_BYTES, Boards

        component = client.register("a", {"x": bytes(1 << 20)})
        boards = Boards()


        def drop():
            global client, component, boards
            addresses = client.session._board.address, boards.board.address
            others = [mapped(address, BOARD_BYTES) for address in addresses]
            del client, component, boards
            gc.collect()
            for other in others:
                assert bytes(other) == bytes([7]) * BOARD_BYTES


        in_a_child(drop)
        with client.acquire("a"):
            assert held() == {"a": 1}
        boards.close()
        client.close()
    """)


def test_a_board_stays_mapped_until_the_process_is_over(run: Run) -> None:
    """Threads that write to it are not waited for at the end of a process."""
    run("""
        import weakref

        board = client.session._board
        at_exit = [f for f, i in weakref.finalize._registry.items() if i.atexit]
        assert not [f for f in at_exit if f.peek()[0] is board]
        client.close()
    """)


def test_copies_of_weights_are_a_childs_own(run: Run) -> None:
    run("""
        model = seeded(Encoder)
        expected = model.norm.weight.clone()
        client.attach({"text": model})
        state = model.state_dict()
        address = state["norm.weight"].untyped_storage().data_ptr()


        def drop():
            global state
            assert torch.equal(state["norm.weight"], expected)
            state["norm.weight"].zero_()
            del state
            gc.collect()
            page = address // vm.PAGE_BYTES * vm.PAGE_BYTES
            others = mapped(page, vm.PAGE_BYTES)
            gc.collect()
            assert bytes(others) == bytes([7]) * vm.PAGE_BYTES


        in_a_child(drop)
        assert torch.equal(state["norm.weight"], expected)
        client.close()
    """)


def test_a_descriptor_dropped_in_a_child_closes_none_of_the_childs(run: Run) -> None:
    """Who becomes a service closes all descriptors, and has others then of the same numbers."""
    run("""
        from swapd.shared.fds import OwnedFd

        fd = OwnedFd(os.open("/dev/null", os.O_RDONLY))


        def drop():
            global fd, client
            numbers = range(3, 256)
            os.closerange(3, 256)
            for number in numbers:
                os.dup2(2, number)
            del fd, client
            gc.collect()
            for number in numbers:
                os.fstat(number)


        in_a_child(drop)
        fd.close()
        client.close()
    """)


HELD_BY_A_THREAD = """
    model = seeded(Encoder)
    expected = model(TOKENS)
    inside, go_on = threading.Event(), threading.Event()


    class Stop(nn.Module):
        def forward(self, x):
            inside.set()
            go_on.wait()
            return x


    model.layers.insert(1, Stop())
    attachment = client.attach({attached})
    go_on.set()
    assert torch.equal(model(TOKENS), expected)
    go_on.clear()
    inside.clear()
    outputs = []


    def work():
        with torch.no_grad():
            {call}


    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    before = held()
    assert before


    def nobody_speaks(*_):
        os.write(2, b"the child speaks for its parent\\n")
        os._exit(3)


    def forked_in_the_midst():
        assert not [t for t in threading.enumerate() if t is not threading.current_thread()]


    # what another thread holds goes as the child begins, before anything can be said in it
    import swapd_client.session.channel as channel
    import swapd_client.leases.keeper as keeper

    mine = os.getpid()
    for owner, name in (
        (channel.Channel, "send"),
        (channel.Channel, "call"),
        (channel.Channel, "abandon"),
        (keeper.Keeper, "keep"),
    ):
        def watched(*args, original=getattr(owner, name), **kwargs):
            if os.getpid() != mine:
                nobody_speaks()
            return original(*args, **kwargs)

        setattr(owner, name, watched)
    in_a_child(forked_in_the_midst)
    assert held() == before
    go_on.set()
    thread.join()
    assert torch.equal(outputs[0], expected)
    evict(client, *(c.name for c in client.status().components))
    assert torch.equal(model(TOKENS), expected)
    assert held() == {{}}
    client.close()
"""


@pytest.mark.parametrize(
    ("attached", "call"),
    [
        ("{'text': model}", "outputs.append(model(TOKENS))"),
        ("{'text': model}, blocks=['layers'], resident=None", "outputs.append(model(TOKENS))"),
        ("{'text': model}, blocks=['layers'], resident=0", "outputs.append(model(TOKENS))"),
        ("{'text': model}", "with attachment.use('text'): outputs.append(model(TOKENS))"),
    ],
    ids=["whole", "streamed, all in", "streamed", "in use"],
)
def test_what_a_thread_holds_when_another_forks_stays_its_own(
    run: Run, attached: str, call: str
) -> None:
    run(dedent(HELD_BY_A_THREAD).format(attached=attached, call=call))


def test_a_lease_and_a_generator_dropped_in_a_child_say_nothing_there(run: Run) -> None:
    run("""
        import warnings
        from swapd_client.offload import collected


        class Steps(Encoder):
            def forward(self, x):
                yield super().forward(x)
                yield None


        model = seeded(Steps)
        client.attach({"text": model})
        steps = model(TOKENS)
        next(steps)
        component = client.register("a", {"x": bytes(1 << 20)})
        lease = client.acquire("a")
        before = held()
        assert before == {"text": 1, "a": 1}


        def drop():
            global steps, lease
            warnings.simplefilter("error")
            with warnings.catch_warnings(record=True) as said:
                del lease, steps
                gc.collect()
            assert not said, said
            assert collected._collected._queue.empty()


        in_a_child(drop)
        assert held() == before
        lease.release()
        steps.close()
        assert held() == {}
        client.close()
    """)
