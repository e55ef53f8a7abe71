"""What newcomers get wrong is an error that tells how it is done right, and nothing is held."""

import copy
import gc
import pickle
from collections.abc import Awaitable, Callable, Iterator
from math import inf, nan
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Client, InvalidArgument, InvalidSource


@pytest.fixture
def client() -> Iterator[Client]:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": bytearray(1 << 20)})
        yield client


def held(client: Client, use: Callable[[Any], object]) -> None:
    with client.acquire("a") as lease:
        use(lease)


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a list": (lambda c: c.acquire(["a"]), "names one by one, as in 'a', 'b'"),
    "a number": (lambda c: c.acquire(7), "name=7: give names one by one"),
    "no text": (lambda c: c.acquire("a", None), "name=None: give names"),
    "a component": (lambda c: c.acquire(c.register("b", {"x": bytearray(8)})), "its name, 'b'"),
    "a list to prefetch": (lambda c: c.prefetch(["a"]), "names one by one"),
    "seconds as text": (lambda c: c.acquire("a", timeout="10s"), "timeout='10s': give a number"),
    "seconds that are no number": (lambda c: c.acquire("a", timeout=float("nan")), "timeout=nan"),
    "a timeout in the past": (lambda c: c.status(timeout=-1), "timeout=-1: give a number"),
    "a question's seconds as text": (lambda c: c.status(timeout="5"), "timeout='5': give a number"),
    "a deadline in the past": (lambda c: c.acquire("a", deadline=-1), "deadline=-1: give the sec"),
    "no deadline": (lambda c: c.acquire("a", deadline=float("nan")), "deadline=nan"),
    "a deadline as text": (lambda c: c.acquire("a", deadline="1"), "deadline='1'"),
    "a workspace": (lambda c: c.acquire_workspace("1MiB", timeout="1"), "timeout='1'"),
    "a size without a unit": (lambda c: c.acquire_workspace("6 big"), "'6 big' is not a size"),
    "a new size": (lambda c: c.resize("a", "much"), "'much' is not a size"),
    "a number too large": (lambda c: c.resize("a", float("inf")), "size=inf: give a size"),
    "no room": (lambda c: c.acquire_workspace(None), "size=None: give a size"),
    "what no message can have": (lambda c: c.follows("a", after=held), "after=<function held"),
    "scratch": (lambda c: c.register_scratch("s", "4 GiBi"), "'4 GiBi' is not a size"),
    "a segment too many": (lambda c: held(c, lambda a: a.wait(1)), "'a' arrives in 1 segment"),
    "a segment below 0": (lambda c: held(c, lambda a: a.wait(-1)), "segment=-1: "),
    "a segment's name": (lambda c: held(c, lambda a: a.wait("a")), "segment='a': "),
    "a module to update with": (lambda c: c.update("a", object()), "as a module's state_dict()"),
    "a list of parts": (lambda c: c.register_family("f", [{"x": b"1"}]), "give a dict of at least"),
    "a component to pin": (lambda c: c.pin(c.register("b", {"x": bytearray(8)})), "its name, 'b'"),
    "a list to evict": (lambda c: c.evict(["a"]), "name=['a']: give a name"),
    "no name to resize": (lambda c: c.resize(None, 5), "name=None: give a name"),
    "a list to forecast": (lambda c: c.forecast(["a"]), "names one by one"),
    "a number to forget": (lambda c: c.forget(7), "name=7: give names one by one"),
    "a list that is followed": (lambda c: c.follows("a", after=["a"]), "after=['a']: give a name"),
    "a list to unregister": (lambda c: c.unregister(["a", "b"]), "name=['a', 'b']: give a name"),
    "a list to update": (lambda c: c.update(["a"], {}), "name=['a']: give a name"),
    "a number of names": (lambda c: c.cheapest(5), "names=5: give names, as in ['vae', 'dit']"),
    "a number of others": (lambda c: c.prefetch("a", over=5), "over=5: give names"),
    "a list as name": (lambda c: c.register(["b"], {"x": b"1"}), "name=['b']: give a name"),
    "a list as family": (lambda c: c.register_family(["b"], {"p": {"x": b"1"}}), "name=['b']: "),
    "a part of several": (lambda c: c.register("b", {"x": b"1"}, part_of=["f"]), "part_of=['f']"),
    "a number of segments": (
        lambda c: c.register("b", {"x": b"1"}, segments=5),
        "segments=5: give lists of names",
    ),
    "numbers of segments": (lambda c: c.register("b", {"x": b"1"}, segments=[0]), "segments=[0]: "),
    "a start": (lambda c: c.acquire_start(timeout="1"), "timeout='1'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_says_how_it_is_done(client: Client, case: str) -> None:
    call, said = WRONG[case]
    with pytest.raises(InvalidArgument) as refused:
        call(client)
    assert said in str(refused.value)
    assert not client.leasing.in_use()
    client.acquire("a").release()  # and the next one is granted


@pytest.mark.parametrize("seconds", [-1, inf, nan, "soon", []])
def test_a_wrong_wait_for_the_next_daemon_is_refused(client: Client, seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match="reconnect="):
        swapd_client.connect(client.session.endpoint, reconnect=seconds)


IN_A_LEASE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a list asked whether new": (lambda a: a.fresh(["s"]), "name=['s']: give a name"),
    "no name asked whether new": (lambda a: a.fresh(None), "name=None: give a name"),
    "a list waited for": (lambda a: a.wait(name=["s"]), "name=['s']: give a name"),
    "a stream's name": (lambda a: a.uses("default"), "stream='default': give a torch.cuda.Stream"),
    "no stream": (lambda a: a.uses(None), "stream=None: give"),
    "a stream below 0": (lambda a: a.wait(stream=-1), "stream=-1: give"),
    "no number of a stream": (lambda a: a.wait(stream=float("nan")), "stream=nan: give"),
}


@pytest.mark.parametrize("case", IN_A_LEASE)
def test_a_wrong_argument_of_a_lease_leaves_it_held(client: Client, case: str) -> None:
    call, said = IN_A_LEASE[case]
    client.register_scratch("s", 1000)
    with client.acquire("a", "s", early=True) as lease:
        with pytest.raises(InvalidArgument) as refused:
            call(lease)
        lease.wait()
        assert lease.held
        assert lease.fresh("s")
    assert said in str(refused.value)


async def awaited(what: object) -> None:
    if isinstance(what, Awaitable):
        await what


@pytest.mark.parametrize("case", IN_A_LEASE)
async def test_so_it_is_with_an_async_lease(client: Client, case: str) -> None:
    call, said = IN_A_LEASE[case]
    client.register_scratch("s", 1000)
    async with await swapd_client.connect_async(client.session.endpoint) as other:
        await other.register("b", {"x": b"1"})
        async with other.acquire("b", early=True) as lease:
            with pytest.raises(InvalidArgument) as refused:
                await awaited(call(lease))
            await lease.wait()
            assert lease.held
    assert said in str(refused.value)


def test_a_wrong_argument_of_a_component_says_what_to_give(client: Client) -> None:
    component = client.register("b", {"x": b"1"})
    scratch = client.register_scratch("s", 1000, mutable=True)
    wrong: Any = ["x"]
    with pytest.raises(InvalidArgument, match=r"key=\['x'\]: give the name of a buffer"):
        component.view(wrong)
    with pytest.raises(InvalidSource, match="'b' has no buffer 'y'; there are: x"):
        component.view("y")
    wrong = 5
    with pytest.raises(InvalidArgument, match=r"ranges=5: give a list of \(offset, bytes\)"):
        scratch.used(wrong)
    client.acquire("s").release()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"device": "gpu0"}, "device='gpu0': give a device, as in 'cuda:0', or 'host'"),
        ({"timeout": 0}, "timeout=0: give the seconds to wait for the daemon's answer"),
        ({"timeout": None}, "timeout=None: give the seconds"),
        ({"timeout": float("inf")}, "timeout=inf: give the seconds"),
        ({"device": 0}, "device=0: give a device, as in 'cuda:0', or 'host'"),
        ({"endpoint": 0}, "endpoint=0: give a device, as in 'cuda:0', or a folder"),
        ({"label": 5}, "label=5: give a text"),
        ({"endpoint": "localhost:9470"}, "has no address on the network"),
        ({"endpoint": "tcp://127.0.0.1:9470"}, "has no address on the network"),
    ],
)
def test_a_wrong_connect_says_how_it_is_done(where: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        swapd_client.connect(**where)
    assert said in str(refused.value)


def test_more_scratch_than_there_are_addresses_is_refused(client: Client) -> None:
    for nbytes in (1 << 70, (1 << 64) + 4096):  # as 64 bits: 0 and 4096
        with pytest.raises(InvalidSource, match=f"scratch of {nbytes} bytes: give a size"):
            client.register_scratch("s", nbytes)


def test_a_wait_for_what_is_not_in_the_lease_is_an_error(client: Client) -> None:
    client.register("f/x", {"x": b"1"}, part_of="f")
    with client.acquire("a", "f/x") as lease:
        lease.wait(name="f")
        with pytest.raises(swapd_client.UnknownComponent, match="'b' is not in this lease"):
            lease.wait(name="b")


def test_a_block_holds_a_lease_of_its_own(client: Client) -> None:
    with client.acquire("a") as lease:
        with pytest.raises(InvalidArgument, match="another block uses it"), lease:
            pass
        assert lease.held
    with pytest.raises(InvalidArgument, match="by this block: it is over"), lease:
        pass


def test_a_question_may_wait_for_any_time(client: Client) -> None:
    for timeout in (1e7, float("inf")):
        assert client.status(timeout=timeout).components


def test_a_misspelt_argument_of_attach_names_the_right_one(client: Client) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgument, match=r"attach\(policyy=...\): did you mean policy=\?"):
        client.attach(torch.nn.Linear(4, 4), policyy="permanent")
    with pytest.raises(InvalidArgument, match="did you mean cpu_offload_strategy"):
        client.attach(torch.nn.Linear(4, 4), cpu_offload_stratgy="sequential")


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"components": 5}, "components=5: give names, as in ['vae', 'dit']"),
        ({"components": [0]}, "components=[0]: give names"),
        ({"blocks": {"dit": 3}}, "blocks={'dit': 3}: give names"),
        ({"wrap_methods": None}, "wrap_methods=None: give names"),
        ({"extra_tensors": 5}, "extra_tensors=5: give names"),
        ({"stay": True}, "stay=True: give names"),
        ({"trainable": 1}, "trainable=1: give names"),
        ({"kinds": ["dit"]}, "kinds=['dit']: give a dict of components and their kinds"),
        ({"settings": {"x": 1}}, "settings={'x': 1}: give an OffloadSettings"),
        ({"prefix": 5}, "prefix=5: give a text"),
    ],
)
def test_a_wrong_argument_of_attach_says_what_to_give(
    client: Client, given: dict[str, Any], said: str, disabled: bool
) -> None:
    torch = pytest.importorskip("torch")
    with (
        swapd_client.connect(client.session.endpoint, disabled=disabled) as other,
        pytest.raises(InvalidArgument) as refused,
    ):
        other.attach(torch.nn.Linear(4, 4), **given)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"files": 5}, "files=5: give a path, or several"),
        ({"module": "model"}, "module='model': give a module of torch"),
        ({"prefix": None}, "prefix=None: give a text"),
        ({"rename": {"a": "b"}}, "rename={'a': 'b'}: give a callable"),
        ({"parts": ["a"]}, "parts=['a']: give a dict of parts and the names of their tensors"),
    ],
)
def test_a_wrong_argument_of_load_says_what_to_give(
    client: Client, given: dict[str, Any], said: str
) -> None:
    pytest.importorskip("torch")
    load = client.load_family if "parts" in given else client.load
    with pytest.raises(InvalidArgument) as refused:
        load("b", **{"files": "/nowhere", **given})
    assert said in str(refused.value)


def test_a_command_speaks_of_the_name_alone(client: Client) -> None:
    """A waiting acquire is no remedy there."""
    for call in (client.pin, client.evict, client.prefetch, client.forecast):
        with pytest.raises(swapd_client.UnknownComponent) as refused:
            call("nope")
        assert "await_registration" not in str(refused.value)
    with pytest.raises(swapd_client.UnknownComponent, match="await_registration=True"):
        client.acquire("nope")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_this_process_is_not_copied(
    client: Client, duplicate: Callable[[object], object]
) -> None:
    component = client.register("b", {"x": bytearray(1 << 20)})
    with client.acquire("a") as lease:
        for one in (client, component, lease):
            with pytest.raises(TypeError, match=r"Leave it out of what you copy"):
                duplicate(one)
    gc.collect()
    client.acquire("a", "b").release()
