"""Parts of one component, registered one by one, in one process and against a real daemon."""

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Conflict, DuplicateName


def test_parts_of_one_family_may_be_in_together_and_exclude_the_others() -> None:
    with (
        spawn.daemon(budget="64MiB", isolation="strict") as daemon,
        swapd_client.connect(daemon.folder) as client,
    ):
        for name, part_of in (("encoders/1", "encoders"), ("encoders/2", "encoders"), ("dit", "")):
            client.register(
                name, {"x": name.encode()}, policy="alternating", group="g", part_of=part_of
            )
        with pytest.raises(DuplicateName, match="stands for parts"):
            client.register("encoders", {"x": b""})
        with client.acquire("encoders/1"), client.acquire("encoders/2"):
            assert bytes(client.session.own("encoders/1").view("x")) == b"encoders/1"
            with pytest.raises(swapd_client.AcquireTimeout):
                client.acquire("dit", timeout=0)
        with client.acquire("dit"), pytest.raises(Conflict):
            client.acquire("dit", "encoders/1")
        with client.acquire("encoders/1", "encoders/2"):
            states = {c.name: c.state for c in client.status().components}
    assert states == {"encoders/1": "leased", "encoders/2": "leased", "dit": "absent"}
