"""A signal handler in machine code: it names the range of an address, then hands the signal on.

It runs in the faulting thread, between two instructions. Handlers of Python's `signal` run later,
so the faulting instruction would repeat for ever. A ctypes callback would take the GIL, which this
thread may hold already. A compiled extension would need a wheel for each platform; userfaultfd is
closed in most containers; a tracing process would exclude a debugger. So these are 250 bytes that
make system calls only: they read a prepared table, write one line, and restore the previous
handler, or jump to it. Without a fault they cost nothing.

`x86_64.s` and `aarch64.s` are the source; a test assembles and compares them.
"""

import ctypes
import platform
import signal

from swapd.shared import vm

_CODE = {
    "x86_64": (
        "f30f1efa5756524c8b05f2000000837e08000f8e940000004c8b4e104d8b1049"
        "8b48084885c90f84800000004c89c8492b02493b4208720c4981c20002000048"
        "ffc9ebdf4883ec70498d78304889e6ba40000000b8590000000f0531d24885c0"
        "480f48c2498d4a1848894c2440498b4a1048894c244848896424504889442458"
        "498b484848894c2460498b485048894c2468bf02000000488d742440ba030000"
        "00b8140000000f054883c4705a5e5f498b40104883f80177424989f1498d7010"
        "31d241ba08000000b80d0000000f0541837908007f244989f8b8270000000f05"
        "4889c7b8ba0000000f054889c64c89c24d89cab8290100000f05c3ffe0cccccc"
    ),
    "aarch64": (
        "5f2403d5290800582a0840b95f0100716d0400542a0840f92b3140a90c0400b4"
        "6d3940a94d010dcbbf010eeb830000546b0108918c0500d1f9ffff17e007b7a9"
        "e20b00f9600c809221c10091e2830091030880d2c80980d2010000d41f0000f1"
        "e0b3809a63610091640940f9e31306a9e3830091e30307a9239144a9e31308a9"
        "400080d2e1830191620080d2480880d2010000d4e20b40f9e007c9a8300940f9"
        "1f0600f1e8020054eb0300aaec0301aa21410091020080d2030180d2c81080d2"
        "010000d48a0940b95f0100718c010054881580d2010000d4ed0300aa481680d2"
        "010000d4e10300aae0030daae2030baae3030caa081e80d2010000d4c0035fd6"
        "00021fd600000000"
    ),
}
_SYS_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}

#: A row: the start of the range, its bytes (0: unused), the length of the text, the text.
ROW_BYTES = 512
TEXT_MAX_BYTES = ROW_BYTES - 24

_SA_SIGINFO, _SA_RESTORER, _SA_ONSTACK = 4, 0x04000000, 0x08000000


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("restorer", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
    )


class _LibcAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_uint64),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_uint64),
    )


class _Data(ctypes.Structure):
    """The data of one handler. The assembler code knows these offsets."""

    _fields_ = (
        ("table", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("before", _Action),
        ("thread", ctypes.c_char * 24),
        ("tail", ctypes.c_uint64),
        ("tail_bytes", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)


def runs_here() -> bool:
    return platform.machine() in _CODE


class Handler:
    """The handler of one signal. Its memory is never freed."""

    def __init__(self, number: signal.Signals, table: int, rows: int, tail: bytes) -> None:
        """Raises: OSError if memory cannot be made executable, as on some hardened systems."""
        code = bytes.fromhex(_CODE[platform.machine()])
        span = vm.round_up(len(code) + 8 + ctypes.sizeof(_Data))
        page = vm.map_anonymous(2 * span)  # code, and its data: never writable and executable
        self._data = _Data.from_address(page + span)
        self._data.table = table
        self._data.thread = b"/proc/thread-self"
        ctypes.memmove(page, code, len(code))
        ctypes.c_uint64.from_address(page + len(code)).value = page + span
        self.number = number
        self._address = page
        self.describe(rows, tail)
        try:
            vm.make_executable(page, span)
            self._install()
        except OSError:
            vm.free(page, 2 * span)
            raise

    @property
    def is_first(self) -> bool:
        """Whether no other handler has replaced it."""
        return bool(_action(self.number).handler == self._address)

    def describe(self, rows: int, tail: bytes) -> None:
        self._tail = ctypes.create_string_buffer(tail)
        self._data.tail_bytes = 0
        self._data.tail = ctypes.addressof(self._tail)
        self._data.tail_bytes = len(tail)
        self._data.rows = rows

    def _install(self) -> None:
        before = self._data.before = _action(self.number)
        # the previous handler's flags and mask, so that it runs as before
        ours = _LibcAction(self._address)
        ours.mask[0] = before.mask
        ours.flags = (before.flags & ~_SA_RESTORER) | _SA_SIGINFO | _SA_ONSTACK
        if _libc.sigaction(self.number, ctypes.byref(ours), None):
            raise OSError(ctypes.get_errno(), "sigaction")


def _action(number: int) -> _Action:
    found = _Action()
    call = ctypes.c_long(_SYS_RT_SIGACTION[platform.machine()])
    if _libc.syscall(call, number, None, ctypes.byref(found), ctypes.c_size_t(8)):
        raise OSError(ctypes.get_errno(), "rt_sigaction")
    return found
