"""`python -m benchmarks.modelled.worker ENDPOINT`: a stage without a model, with line commands."""

import json
import mmap
import sys
import time
from typing import Any

import swapd_client
from swapd.device.driver import Driver


class Work:
    """A method for each command."""

    def __init__(self, endpoint: str) -> None:
        self._client = swapd_client.connect(endpoint, label="modelled")
        self._leases: dict[str, Any] = {}
        self._spent_s = 0.0

    def start(self) -> int:
        """The size of a chunk."""
        return self._client.session.welcome.chunk_bytes

    def register(self, name: str, nbytes: int) -> None:
        with mmap.mmap(-1, nbytes) as data:
            self._client.register(name, {"data": memoryview(data)})

    def scratch(self, name: str, nbytes: int) -> None:
        self._client.register_scratch(name, nbytes)

    def swap(self, rounds: int) -> list[float]:
        """Milliseconds of each acquire of two components that take turns."""
        taken = []
        for _ in range(rounds):
            for name in "ab":
                start = time.perf_counter()
                lease = self._client.acquire(name)
                taken.append((time.perf_counter() - start) * 1e3)
                lease.release()
                time.sleep(0.005)
        return taken

    def bare_copies(self, nbytes: int, rounds: int) -> list[float]:
        """Milliseconds of each copy of pinned memory."""
        driver = Driver.by_uuid(self._client.session.welcome.uuid)
        taken = []
        with driver.current():
            api = driver.api
            host = driver.allocate_pinned(nbytes)
            target = driver.call(api.cuMemAlloc, nbytes)
            stream = driver.stream()
            for _ in range(rounds):
                start = time.perf_counter()
                driver.copy_to_device(int(target), host, nbytes, stream)
                driver.finish(stream)
                taken.append((time.perf_counter() - start) * 1e3)
                time.sleep(0.005)
            driver.destroy_stream(stream)
            driver.call(api.cuMemFree, target)
            driver.free_pinned(host)
        return taken

    def hold(self, name: str) -> None:
        self._leases[name] = self._client.acquire(name)

    def let_go(self, name: str) -> None:
        """Release, and count this process's processor time from now on."""
        self._spent_s = time.process_time()
        self._leases.pop(name).release()

    def spent_ms(self) -> float:
        return (time.process_time() - self._spent_s) * 1e3


def main() -> None:
    work = Work(sys.argv[1])
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(work, do)(*arguments)) + "\n")
        sys.stdout.flush()
    work._client.close(keep=False)


if __name__ == "__main__":
    main()
