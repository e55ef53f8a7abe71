"""A read outside of a lease prints component, thread and remedy; then the process dies as before.

Each fault has a process of its own, under strict isolation.
"""

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import swapd_client
from swapd import spawn
from swapd_client.faults import handler
from tests import forked

FAULTS = Path(handler.__file__).parent

#: The start of each program: an absent component, and ways to touch it.
BEGIN = """
import ctypes, faulthandler, os, signal, sys, threading
faulthandler.disable()
import swapd_client
how = {} if sys.argv[2] == "by default" else {"faults": sys.argv[2] or None}
client = swapd_client.connect(sys.argv[1], **how)
part = client.register("secret", {"x": bytes(1 << 20)})
client.acquire("secret").release()
def die(address=part.address):
    ctypes.string_at(address, 8)
"""
TORCH = """
import torch
torch.set_num_threads(2)
module = torch.nn.Linear(512, 512)
other = torch.nn.Linear(8, 8)
client.register("linear", module)
client.register("other", other)
"""


def died(
    daemon: spawn.Spawned, program: str, by: signal.Signals = signal.SIGSEGV, how: str = "explain"
) -> str:
    """The output of a program that touches memory without a lease, and dies by that signal."""
    with forked.Popen(
        [sys.executable, "-c", BEGIN + program, str(daemon.folder), how],
        imported=("torch",) if "torch" in program else (),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, said = process.communicate()
    assert process.returncode == -by, (process.returncode, said)
    assert isinstance(said, str)
    return said


def explained(said: str, component: str) -> re.Match[str]:
    pattern = rf"swapd: a fault in component '{component}' \(0x[0-9a-f]+\), thread (\d+)/task/(\d+)"
    found = re.search(pattern + ": it was read or written outside of a lease.*client.acquire", said)
    assert found, said
    return found


def test_a_read_in_the_main_thread_is_explained(daemon: spawn.Spawned) -> None:
    said = died(daemon, "print(os.getpid(), file=sys.stderr, flush=True)\ndie()")
    pid, line = said.splitlines()
    assert explained(line, "secret").groups() == (pid, pid)


def test_a_read_in_another_thread_names_that_thread(daemon: spawn.Spawned) -> None:
    said = died(
        daemon,
        """
def touch():
    print(threading.get_native_id(), file=sys.stderr, flush=True)
    die()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
""",
    )
    thread, line = said.splitlines()
    assert explained(line, "secret")[2] == thread


@pytest.mark.parametrize(
    ("touch", "component"),
    [
        ("bytes(part.view('x')[:8])", "secret"),
        ("ctypes.memmove(ctypes.create_string_buffer(64), part.address + 4096, 64)", "secret"),
        ("ctypes.CDLL(None).memset(ctypes.c_void_p(part.address), 0, 64)", "secret"),
        (TORCH + "module(torch.ones(64, 512))", "linear"),
        (TORCH + "module.weight.detach().numpy().sum()", "linear"),
    ],
    ids=["with the GIL", "a read in C", "a write in C", "torch", "numpy"],
)
def test_any_code_is_explained_by_the_component_it_was_in(
    daemon: spawn.Spawned, touch: str, component: str
) -> None:
    assert explained(died(daemon, touch), component)


def test_a_write_under_a_lease_to_what_is_read_only_is_explained(daemon: spawn.Spawned) -> None:
    program = TORCH + "with client.acquire('linear'), torch.no_grad():\n    module.weight.zero_()"
    assert "read-only" in explained(died(daemon, program), "linear").string


def test_a_fault_outside_of_every_component_is_as_it_was(daemon: spawn.Spawned) -> None:
    assert died(daemon, "die(8)") == ""
    nowhere = "from swapd.shared import vm; die(vm.reserve(4096))"
    assert died(daemon, nowhere) == ""
    assert died(daemon, "os.kill(os.getpid(), signal.SIGSEGV)") == ""
    assert died(daemon, "signal.raise_signal(signal.SIGBUS)", signal.SIGBUS) == ""
    assert died(daemon, "os.abort()", signal.SIGABRT) == ""


def test_what_is_no_component_any_more_is_as_it_was(daemon: spawn.Spawned) -> None:
    hide = "ctypes.CDLL(None).mprotect(ctypes.c_void_p(part.address), 4096, 0)\ndie()"
    assert died(daemon, f"client.unregister('secret')\n{hide}") == ""
    assert died(daemon, f"client.close()\n{hide}") == ""


def test_what_a_client_let_go_of_is_said_to_be(daemon: spawn.Spawned) -> None:
    assert "close(keep=False) let go of it" in died(daemon, "client.close(keep=False)\ndie()")


def test_nothing_is_said_unless_it_is_asked_for(daemon: spawn.Spawned) -> None:
    assert died(daemon, "die()", how="") == ""


def test_a_bus_error_is_explained(daemon: spawn.Spawned) -> None:
    """For example, of memory that another process has truncated."""
    program = """
fd = os.memfd_create("short")
os.ftruncate(fd, 4096)
import mmap
libc = ctypes.CDLL(None)
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mmap(part.address, 4096, 1, mmap.MAP_SHARED | 0x10, fd, 0)
os.ftruncate(fd, 0)
die()
"""
    assert explained(died(daemon, program, signal.SIGBUS), "secret")


@pytest.mark.parametrize("order", ["before", "after"])
def test_faulthandler_says_its_part_too(daemon: spawn.Spawned, order: str) -> None:
    enable = "faulthandler.enable()\nswapd_client.explain_faults()\ndie()"
    if order == "after":
        enable = "swapd_client.explain_faults()\n" + enable
    said = died(daemon, enable)
    assert explained(said, "secret")
    assert said.count("swapd:") == 1
    assert said.count("Fatal Python error: Segmentation fault") == 1
    assert 'File "<string>"' in said
    elsewhere = died(daemon, enable.replace("die()", "die(8)"))
    assert "swapd:" not in elsewhere
    assert "Fatal Python error: Segmentation fault" in elsewhere


def test_faulthandler_that_comes_later_still_has_the_process_die(daemon: spawn.Spawned) -> None:
    said = died(daemon, "faulthandler.enable()\ndie()")
    assert "Fatal Python error: Segmentation fault" in said


def test_a_forked_child_is_told_that_it_is_one(daemon: spawn.Spawned) -> None:
    program = """
child = os.fork()
if not child:
    die()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
die()
"""
    child, parent = died(daemon, program).splitlines()
    assert "component 'secret'" in child
    assert "forked" in child
    assert explained(parent, "secret")


def test_a_child_that_connects_by_itself_is_told_what_it_did(daemon: spawn.Spawned) -> None:
    program = """
if not (child := os.fork()):
    client = swapd_client.connect(sys.argv[1], faults="explain")
    die(client.register("own", {"x": b"1"}).address)
os.waitpid(child, 0)
die()
"""
    child, parent = died(daemon, program).splitlines()
    assert explained(child, "own")
    assert "forked" in child  # the child has the inherited component, too
    assert explained(parent, "secret")


def test_a_child_that_inherited_nothing_is_told_nothing_of_it(daemon: spawn.Spawned) -> None:
    program = """
import os, sys, swapd_client
if not (child := os.fork()):
    exec(sys.argv[3])
_, status = os.waitpid(child, 0)
os.kill(os.getpid(), -os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(daemon.folder), "explain", BEGIN + "die()"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGSEGV
    assert explained(done.stderr, "secret")
    assert "forked" not in done.stderr


def test_all_components_of_all_clients_are_known(daemon: spawn.Spawned) -> None:
    program = """
other = swapd_client.connect(sys.argv[1])
parts = [other.register(f"p{n}", {"x": b"1"}) for n in range(20)]
for n in range(10):
    other.unregister(f"p{n}")
parts += [other.register(f"q{n}", {"x": b"1"}) for n in range(15)]
for part in parts[10:]:
    if not (child := os.fork()):
        die(part.address)
    os.waitpid(child, 0)
die()
"""
    said = died(daemon, program)
    names = re.findall(r"component '(\w+)'", said)
    assert names == [f"p{n}" for n in range(10, 20)] + [f"q{n}" for n in range(15)] + ["secret"]


def test_a_core_is_written_as_before(daemon: spawn.Spawned, tmp_path: Path) -> None:
    outcomes = {}
    for how in ("", "explain"):
        limit = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))\n"
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + limit + "die()", str(daemon.folder), how],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        process.wait()
        assert ended is not None
        outcomes[how] = (ended.si_code, ended.si_status)
    assert outcomes[""] == outcomes["explain"]
    assert outcomes[""][1] == signal.SIGSEGV


def test_connect_refuses_what_it_does_not_know(daemon: spawn.Spawned) -> None:
    with pytest.raises(swapd_client.InvalidArgument, match="give 'explain'"):
        swapd_client.connect(daemon.folder, faults="yes")  # type: ignore[arg-type]


def test_a_machine_without_a_handler_goes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    caplog.set_level("INFO")
    assert not swapd_client.explain_faults()
    assert "no handler for this machine" in caplog.text


def test_the_bytes_are_those_of_the_source(tmp_path: Path) -> None:
    machine = platform.machine()
    made, code = tmp_path / "handler.o", tmp_path / "handler.bin"
    source = FAULTS / f"{machine}.s"
    subprocess.run(["gcc", "-c", "-x", "assembler", "-o", made, source], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, code], check=True)
    assert code.read_bytes().hex() == handler._CODE[machine]
