"""Makes the screenshots of the page: `python docs/screenshots.py [--seconds N]`.

Three stages take turns for a while on a device that cannot hold them all. Then the script takes
pictures of the page while one stage waits: light on a desktop, dark on a phone. Needs the extra
`dev`, and an installed Chromium.
"""

import argparse
import io
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import swapd_client
from swapd import spawn

HERE = Path(__file__).parent
MIB = 1 << 20
#: Components of each stage: bytes, and seconds of computing on each.
STAGES = {
    "thinker": {"thinker": (48 * MIB, 1.2)},
    "talker": {"talker": (28 * MIB, 0.9), "talker-embed": (6 * MIB, 0.1)},
    "code2wav": {"code2wav": (14 * MIB, 0.5), "vocoder": (8 * MIB, 0.3)},
}
#: File, width, height and colors of each picture.
PICTURES = (("page-light.png", 960, 860, "light"), ("page-dark.png", 390, 860, "dark"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python docs/screenshots.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="of turns before (45)")
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.stderr.write("no Chromium is installed: apt-get install chromium\n")
        return 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        spawn.daemon(budget="80MiB", bandwidth="80MB/s", http=address) as daemon,
        ExitStack() as stack,
        sync_playwright() as play,
    ):
        clients = {
            stage: stack.enter_context(swapd_client.connect(daemon.folder, label=f"stage {stage}"))
            for stage in STAGES
        }
        for stage, client in clients.items():
            for name, (nbytes, _) in STAGES[stage].items():
                client.register(name, {"weights": bytearray(nbytes)})
        _take_turns(clients, given.seconds)
        arguments = ["--no-sandbox", "--hide-scrollbars"]
        with (
            play.chromium.launch(executable_path=chromium, args=arguments) as browser,
            _one_waits(clients),
        ):
            for file, width, height, colors in PICTURES:
                _picture(browser, f"http://{address}/", HERE / file, width, height, colors)
    return 0


def _take_turns(clients: dict[str, swapd_client.Client], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for stage, client in clients.items():
            for name, (_, computes_s) in STAGES[stage].items():
                with client.acquire(name):
                    time.sleep(computes_s)


@contextmanager
def _one_waits(clients: dict[str, swapd_client.Client]) -> Iterator[None]:
    lease = clients["thinker"].acquire("thinker")
    waiter = threading.Thread(target=lambda: clients["talker"].acquire("talker").release())
    held = clients["code2wav"].acquire("code2wav")
    waiter.start()
    try:
        yield
    finally:
        lease.release()
        held.release()
        waiter.join()


def _picture(browser: Browser, url: str, file: Path, width: int, height: int, colors: str) -> None:
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if colors == "dark" else "light",
    )
    page.goto(url)
    page.wait_for_selector("#waits li .why:not(:empty)")
    page.wait_for_function("status.host_copy_bytes > 0")
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
    page.close()


if __name__ == "__main__":
    sys.exit(main())
