"""What a session cannot have more of is refused with the limit, and costs nobody else anything."""

import pytest
import zmq

import swapd_client
from swapd import spawn
from swapd.daemon.sessions import NAMES_CHARS_MAX
from swapd.shared import protocol
from swapd.shared.runtime_dir import RPC

from . import harness

#: A daemon in which a session has few components.
FEW = r"""
import runpy, sys
from swapd.shared import board
board.SLOTS = 4
sys.argv[1:1] = ["serve"]
runpy.run_module("swapd", run_name="__main__", alter_sys=True)
"""


def test_a_component_too_many_is_refused_with_the_limit_and_another_session_has_room() -> None:
    with (
        spawn.daemon(("-c", FEW), budget="16MiB") as daemon,
        swapd_client.connect(daemon.folder) as client,
        swapd_client.connect(daemon.folder) as other,
    ):
        for number in range(4):
            client.register(f"c{number}", {"x": bytearray(16)})
        with pytest.raises(swapd_client.LimitReached, match="components at most"):
            client.register("c4", {"x": bytearray(16)})
        other.register("c4", {"x": bytearray(16)})
        client.unregister("c0")
        client.register("c0", {"x": bytearray(16)})


def test_a_socket_whose_requests_would_never_be_answered_is_not_let_in() -> None:
    with (
        spawn.daemon(budget="16MiB") as daemon,
        swapd_client.connect(daemon.folder) as client,
        zmq.Context() as context,
        context.socket(zmq.REQ) as socket,
    ):
        socket.linger = 0
        socket.routing_id = client.session.welcome.token + bytes(4)
        with socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
            socket.connect(f"ipc://{daemon.folder / RPC}")
            assert events.poll(20_000)
            socket.disable_monitor()


def test_waits_for_many_long_names_are_bounded_by_their_characters() -> None:
    names = tuple(f"{number:04}".ljust(protocol.NAME_MAX_CHARS, "x") for number in range(1024))
    bound = NAMES_CHARS_MAX // sum(map(len, names)) + 1
    with spawn.daemon(budget="16MiB") as daemon, harness.RawSession(daemon.folder) as raw:
        for _ in range(bound):
            wait = protocol.Acquire(raw.next_id(), names, await_registration=True)
            raw.rpc.send(protocol.encode(wait))
        refused = raw.ask(protocol.Acquire(raw.next_id(), ("a",), await_registration=True))
        assert isinstance(refused, protocol.Refused)
        assert (refused.code, "too many components" in refused.message) == ("limit", True)
        raw.rpc.send(protocol.encode(protocol.Cancel(raw.next_id(), 1)))  # there is room again
        reply = raw.ask(protocol.Acquire(raw.next_id(), ("a",)))
        assert isinstance(reply, protocol.Refused)
        assert reply.code == "unknown_component"
