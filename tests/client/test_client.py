"""The synchronous client in one process, against a real daemon."""

import threading

import swapd_client
from swapd import spawn


def test_a_thread_that_waits_for_a_name_gets_what_another_registers() -> None:
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        for i in range(20):
            name = f"late-{i}"
            seen: list[bytes] = []

            def use(name: str = name, seen: list[bytes] = seen) -> None:
                with client.acquire(name, wait=True):
                    seen.append(bytes(client.session.own(name).view("x")))

            waiting = threading.Thread(target=use)
            waiting.start()
            client.register(name, {"x": name.encode()})
            waiting.join()
            assert seen == [name.encode()]
