"""An interrupt at any place of a call leaves nothing half done, and the next call succeeds."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import Client, InUse
from swapd_client.finalizers import settle
from tests.interrupts import forget, interrupt, interrupts, places

#: Places of one call.
MOST = 60
PARTS = {"one": {"x": bytes(4096)}, "two": {"x": b"\1" * 4096}}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Spawned]:
    with spawn.daemon(budget="16MiB", isolation="strict") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Spawned, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # the wait for an answer that was read, and lost in the interrupt
    monkeypatch.setattr("swapd_client.session.channel.GRACE_S", 0.2)
    with swapd_client.connect(daemon.folder) as client, interrupts():
        yield client


def made() -> Tensors:
    return {"w": torch.arange(5000.0), "v": torch.ones(100)}


def written(client: Client) -> Tensors:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in made().items()}
    client.register("a", tensors, mutable=True)
    with client.acquire("a"):
        for name, tensor in made().items():
            tensors[name].copy_(tensor)
    return tensors


def registered(client: Client) -> Tensors:
    tensors = made()
    client.register("a", tensors)
    return tensors


def assert_whole(tensors: Tensors) -> None:
    assert all(torch.equal(tensors[name], tensor) for name, tensor in made().items())


def assert_none_is_left(client: Client, other: Client) -> None:
    assert other.status().components == ()
    assert not client.session.components
    assert not client.session.leases


def unregister_all(client: Client) -> None:
    for name in list(client.session.components):
        client.unregister(name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what is collected is closed then
def test_an_interrupted_connect_leaves_no_session(daemon: Spawned, other: Client) -> None:
    def connect() -> None:
        swapd_client.connect(daemon.folder, label="new").close()

    connect()
    with interrupts():
        for place in places(connect, 2 * MOST):
            interrupt(connect, place)
            forget()
            settle()
            while "new" in [session.label for session in other.status().sessions]:
                """Soon."""
            assert "swapd-check" not in [thread.name for thread in threading.enumerate()]


def test_an_interrupted_acquire_or_release_holds_nothing(client: Client, other: Client) -> None:
    registered(client)
    client.register("b", {"x": bytes(4096)})

    def evict() -> None:
        while True:
            with suppress(InUse):  # it may overtake a release, or a request and its cancellation
                return other.evict("a")

    def use() -> None:
        evict()
        with client.acquire("a") as lease:
            lease.rests()
            with client.acquire("a", "b", timeout=30):
                pass
        with client.acquire("a", early=True) as lease:
            lease.wait()

    def await_released() -> None:
        while any(component.leases for component in other.status().components):
            """Soon."""

    use()
    for place in places(use, 3 * MOST):
        interrupt(use, place)
        await_released()
    unregister_all(client)


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_interrupted_register_has_registered_nothing_and_moved_nothing(
    client: Client, other: Client, name: str
) -> None:
    """So the tensors can be registered again, also under another name."""
    client.register("a", made())
    client.unregister("a")
    for place in places(lambda: client.register("a", made()), MOST):
        unregister_all(client)
        tensors = made()
        if interrupt(partial(client.register, "a", tensors), place) is None:
            assert_none_is_left(client, other)
            assert_whole(tensors)
            client.register(name, tensors)
        with client.acquire(*client.session.components):
            assert_whole(tensors)
        unregister_all(client)
        assert_whole(tensors)


def former(daemon: Spawned) -> Tensors:
    """Tensors of a lost daemon."""
    with swapd_client.connect(daemon.folder) as lost:
        tensors = registered(lost)
        lost.session.life.deserted = True
    return tensors


def test_after_an_interrupted_register_the_next_one_keeps_the_address_of_former_tensors(
    client: Client, other: Client, daemon: Spawned
) -> None:
    for _ in range(2):
        tensors = former(daemon)
        found = places(partial(client.register, "a", tensors), MOST)
        unregister_all(client)
    for place in found:
        tensors = former(daemon)
        at = tensors["w"].data_ptr()
        if interrupt(partial(client.register, "a", tensors), place) is None:
            assert_none_is_left(client, other)
            client.register("a", tensors)
        assert tensors["w"].data_ptr() == at
        with client.acquire("a"):
            assert_whole(tensors)
        unregister_all(client)
        assert_whole(tensors)


@pytest.mark.parametrize("make", [registered, written])
def test_after_an_interrupted_unregister_the_tensors_have_their_bytes(
    client: Client, other: Client, make: Callable[[Client], Tensors]
) -> None:
    """It is registered, and can be acquired and unregistered; or it is private."""
    unregister = partial(client.unregister, "a")
    for _ in range(2):
        make(client)
        found = places(unregister, 2 * MOST)
    for place in found:
        tensors = make(client)
        interrupt(unregister, place)
        if client.session.components:
            with client.acquire("a"):
                assert_whole(tensors)
            client.unregister("a")
        assert_whole(tensors)
        assert_none_is_left(client, other)


@pytest.mark.parametrize("call", ["register_scratch", "register_family"])
def test_an_interrupted_registration_of_scratch_or_of_a_family_leaves_no_part(
    client: Client, other: Client, call: str
) -> None:
    what = {"register_scratch": ("a", 1 << 16), "register_family": ("a", PARTS)}[call]
    register = partial(getattr(client, call), *what)
    register()
    client.unregister("a")
    for place in places(register, MOST):
        unregister_all(client)
        if interrupt(register, place) is None:
            assert_none_is_left(client, other)
            register()
        with client.acquire("a"):
            pass
        unregister_all(client)


def test_an_interrupted_unregister_of_a_family_can_go_on(client: Client, other: Client) -> None:
    def unregister() -> None:
        client.register_family("a", PARTS)
        client.unregister("a")

    unregister()
    for place in places(unregister, 2 * MOST):
        interrupt(unregister, place)
        unregister_all(client)
        assert_none_is_left(client, other)


def test_an_interrupted_workspace_or_start_is_over(client: Client, other: Client) -> None:
    def hold() -> None:
        with client.acquire_workspace("1MiB"):
            pass
        client.acquire_start().release()

    hold()
    for place in places(hold, MOST):
        interrupt(hold, place)
        other.acquire_workspace("16MiB", timeout=30).release()
        other.acquire_start(timeout=30).release()


@pytest.fixture
def grad_mode() -> Iterator[None]:
    """Interrupts end a `with torch.no_grad()` before its end has run."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("grad_mode")
def test_an_interrupted_update_has_given_all_the_new_values_or_none(
    client: Client, other: Client
) -> None:
    tensors = registered(client)
    new = {name: tensor + 1 for name, tensor in made().items()}
    client.update("a", new)
    for place in places(lambda: client.update("a", made()), MOST):
        client.update("a", made())
        interrupt(partial(client.update, "a", new), place)
        with client.acquire("a"):
            first = tensors["w"][0].item()
            assert all(torch.equal(tensors[name], made()[name] + first) for name in tensors)
    client.unregister("a")
    assert_none_is_left(client, other)


@pytest.mark.parametrize("parts", [None, {"one": ["w"], "rest": []}])
def test_an_interrupted_load_has_loaded_nothing(
    client: Client, other: Client, tmp_path: Path, parts: dict[str, list[str]] | None
) -> None:
    file = tmp_path / "a.safetensors"
    save_file(made(), file)

    def load() -> list[swapd_client.Component]:
        if parts is None:
            return [client.load("a", file)]
        return client.load_family("a", file, parts)

    load()
    client.unregister("a")
    found = places(load, MOST)
    client.unregister("a")
    for place in found:
        loaded = interrupt(load, place)
        if loaded is None:
            assert_none_is_left(client, other)
            loaded = load()
        with client.acquire("a"):
            assert_whole({name: t for one in loaded for name, t in one.tensors.items()})
        client.unregister("a")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.resize("f", 0),
        lambda client: client.pin("f"),
        lambda client: client.unpin("f"),
        lambda client: client.evict("f"),
        lambda client: client.forget(),
        lambda client: client.prefetch("f"),
        lambda client: client.follows("a", after="f"),
        lambda client: client.cheapest(["a", "f"], timeout=30),
        lambda client: client.status(timeout=30),
    ],
)
def test_an_interrupted_order_or_question_may_be_repeated(
    client: Client, other: Client, call: Callable[[Client], object]
) -> None:
    tensors = registered(client)
    client.register_family("f", PARTS)
    call(client)
    for place in places(partial(call, client), MOST // 4):
        interrupt(partial(call, client), place)
        call(client)
        with client.acquire("a", "f"):
            assert_whole(tensors)
    client.unregister("f")
    client.unregister("a")
    assert_none_is_left(client, other)


def test_an_interrupt_leaves_no_lock_taken() -> None:
    """`with` of a Condition runs Python code, in which an interrupt leaves its lock taken; `with`
    of the lock itself runs none."""
    sources = Path(swapd_client.__file__).parent.rglob("*.py")
    code = {path.name: path.read_text() for path in sources}
    assert [name for name, text in code.items() if "Condition()" in text] == []
    conditions = {
        name: re.findall(r"self\.(\w+) = threading\.Condition\(", text)
        for name, text in code.items()
    }
    assert sum(map(len, conditions.values())) > 5
    taken = [
        name
        for name, found in conditions.items()
        for one in found
        if re.search(rf"\bwith [^\n]*\.{one}\b", code[name])
    ]
    assert taken == []
