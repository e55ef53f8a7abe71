"""Makes top.svg beside it: `swapd top` while three stages take turns and a fourth waits.

    python docs/screenshots/top.py

A real daemon on the host device, with real copies; needs 2 GiB of memory.
"""

import asyncio
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import swapd_client
from swapd import spawn
from swapd.cli.live.app import Poller, Top

SIZE = (80, 24)
OUT = Path(__file__).with_suffix(".svg")
MIB = 1 << 20
STAGES = {"thinker": ("thinker", 352), "talker": ("talker", 192), "painter": ("dit", 288)}


class Shot(Top):
    """Takes the picture at the first drawing whose text satisfies `wants`."""

    def __init__(self, poller: Poller, wants: Callable[[str], bool]) -> None:
        self.taken = asyncio.Event()
        self._wants = wants
        super().__init__(poller, 30.0)

    def draw(self) -> None:
        super().draw()
        if self._wants(str(self._live.content)):
            self.call_after_refresh(self._take)
            self._wants = lambda _: False

    def _take(self) -> None:
        OUT.write_text(without_fonts(self.export_screenshot(title="swapd top")))
        self.taken.set()


def without_fonts(svg: str) -> str:
    """Remove web fonts, so that the file fetches nothing: every viewer has a monospaced font."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


async def main() -> None:
    with ExitStack() as opened:
        daemon = opened.enter_context(spawn.daemon(budget="640MiB"))
        clients = {}
        for label, (name, mib) in STAGES.items():
            clients[label] = swapd_client.connect(daemon.folder, label=label)
            opened.callback(clients[label].close)
            clients[label].register(name, {"w": bytearray(mib * MIB)})
        vae = opened.enter_context(swapd_client.connect(daemon.folder, label="decoder"))
        vae.register("vae", {"w": bytearray(320 * MIB)})
        vae.acquire("vae").release()
        clients["thinker"].acquire("thinker").release()
        held = clients["thinker"].acquire("thinker")
        clients["talker"].acquire("talker").release()
        clients["talker"].pin("talker")

        poller = Poller(daemon.folder, 30.0)
        poller.start()
        opened.callback(poller.close)
        app = Shot(poller, lambda text: "\nwaiting\n" in text)
        async with app.run_test(size=SIZE), asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(clients["painter"].acquire, "dit"))
            async with asyncio.timeout(60):
                await app.taken.wait()
            held.release()


if __name__ == "__main__":
    asyncio.run(main())
