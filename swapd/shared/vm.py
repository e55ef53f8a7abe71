"""Address space: reserve, map, shelve, copy. Linux, ctypes, no policy.

Addresses and lengths are multiples of the page size. All calls block briefly, and raise OSError.

Shelving makes a swap cheap: mremap moves the page tables of 256 MiB aside in 0.1 ms and back in
0.04 ms, and no page faults afterwards. Unmapping these 4 KiB pages, or mprotect, would cost 4 ms,
and touching them anew up to 20 ms. MREMAP_DONTUNMAP leaves the old range mapped, so no other
thread's mmap can take it in between.
"""

import ctypes
import errno
import os
import weakref

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
_PROT_EXEC = 4
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_DONTDUMP = 10, 14, 16
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
#: The kernel moves whole page tables if both ranges are aligned to the span of one table.
_ALIGN_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.pwrite.restype = ctypes.c_ssize_t
_libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value
#: Bytes to read from a file per comparison; they should fit a core's cache.
_COMPARE_BYTES = 256 << 10
#: Pages per read of /proc/self/pagemap; and the highest bytes of its words for absent pages and
#: pages of a file. Bits 63, 62 and 61 mean present, swapped, and of a file.
_PAGEMAP_PAGES = 1 << 17
_FILE_OR_ABSENT = bytes(b for b in range(256) if not b & 0xC0 or b & 0xE0 == 0xA0)
#: Bytes per call of `write`. Signal handlers run between two calls.
_WRITE_BYTES = 64 << 20


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-nbytes // unit) * unit


def reserve(nbytes: int) -> int:
    """Reserve addresses, aligned for shelving. Any access faults. `free` ends the reservation.

    The range is in no forked child or core dump.
    """
    start = _mmap(None, nbytes + _ALIGN_BYTES, PROT_NONE, _ANON, -1, 0)
    address = round_up(start, _ALIGN_BYTES)
    end = start + nbytes + _ALIGN_BYTES
    if address > start:
        free(start, address - start)
    if end > address + nbytes:
        free(address + nbytes, end - address - nbytes)
    _keep_here(address, nbytes)
    return address


def free(address: int, nbytes: int) -> None:
    _check(_libc.munmap(address, nbytes))


def free_with(owner: object, address: int, nbytes: int) -> None:
    """Unmap a range when `owner` is gone, in this process only: a child has another mapping there.
    At the end of the process it stays mapped, for the remaining threads."""
    weakref.finalize(owner, _free_in, os.getpid(), address, nbytes).atexit = False


def _free_in(process: int, address: int, nbytes: int) -> None:
    if os.getpid() == process:
        free(address, nbytes)


def map_shared(fd: int, offset: int, nbytes: int, *, writable: bool, at: int | None = None) -> int:
    """Map a part of `fd`; `at` replaces a mapping. The range is in no forked child or core dump."""
    prot = PROT_READ | PROT_WRITE if writable else PROT_READ
    flags = _MAP_SHARED | (_MAP_FIXED if at is not None else 0)
    address = _mmap(at, nbytes, prot, flags, fd, offset)
    _keep_here(address, nbytes)
    return address


def map_private(fd: int, nbytes: int, *, at: int) -> None:
    """Replace the mapping at `at` by a private, writable copy-on-write view of `fd`, which is in no
    core dump."""
    _mmap(at, nbytes, PROT_READ | PROT_WRITE, _MAP_PRIVATE | _MAP_FIXED, fd, 0)
    leave_out_of_cores(at, nbytes)


def map_anonymous(nbytes: int, *, at: int | None = None) -> int:
    """Map fresh private memory; `at` replaces a mapping."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | (_MAP_FIXED if at is not None else 0)
    return _mmap(at, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0)


def leave_out_of_cores(address: int, nbytes: int) -> None:
    """Keep a mapping out of core dumps, also after a move: weights are large, and secret."""
    _madvise(address, nbytes, _MADV_DONTDUMP)


def revoke(address: int, nbytes: int) -> None:
    """Replace a mapping by a reservation: any access faults. If the process may have no more
    mappings, this one stays, and any access faults all the same."""
    try:
        _mmap(address, nbytes, PROT_NONE, _ANON | _MAP_FIXED, -1, 0)
    except OSError:
        protect_none(address, nbytes)
    _keep_here(address, nbytes)


def protect_none(address: int, nbytes: int) -> None:
    _check(_libc.mprotect(address, nbytes, PROT_NONE))


def make_executable(address: int, nbytes: int) -> None:
    _check(_libc.mprotect(address, nbytes, PROT_READ | _PROT_EXEC))


def move_pages(source: int, target: int, nbytes: int) -> None:
    """Move one mapping's pages to `target`, replacing its mapping; `source` stays mapped, empty.

    Raises: OSError (EINVAL) if the kernel cannot do that for shared memory (before 5.13).
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _libc.mremap(source, nbytes, nbytes, flags, target) == _FAILED:
        _raise()


def prefer_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for huge pages. The system's `shmem_enabled` decides."""
    return bool(_libc.madvise(address, nbytes, _MADV_HUGEPAGE) == 0)


def populate(address: int, nbytes: int, *, writable: bool) -> None:
    """Make every page present now. Releases the GIL; takes about 0.1 s for each GiB.

    Where the kernel has no call for it (gVisor), each page is read, and the GIL is held.
    """
    try:
        populate_in_one(address, nbytes, writable=writable)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        view(address, nbytes)[::PAGE_BYTES].tobytes()


def populate_in_one(address: int, nbytes: int, *, writable: bool) -> None:
    """As `populate`, with the kernel's call. Raises: OSError (EINVAL) if there is none."""
    _madvise(address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give a range of a memfd back to the system; later accesses find zeros."""
    _check(_libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, nbytes))


#: unmap(address, nbytes): as `free`, but returns whether it failed. No signal handler runs before a
#: call of this C function, as it may before one of Python.
unmap = _libc.munmap
#: copy(target, source, nbytes): memmove without the GIL.
copy = ctypes.memmove


def write(fd: int, offset: int, source: int, nbytes: int) -> None:
    """Copy memory into a file without mapping it, in half the time of a copy into a new mapping,
    where every page faults. Releases the GIL."""
    end = offset + nbytes
    while offset < end:
        done = _libc.pwrite(fd, source, min(end - offset, _WRITE_BYTES), offset)
        if done > 0:
            offset, source = offset + done, source + done
        elif ctypes.get_errno() != errno.EINTR:
            _raise()


def has_bytes(fd: int, offset: int, source: int, nbytes: int) -> bool:
    """Return whether a file has these bytes of memory at `offset`, without mapping it, as it may be
    sealed. Raises: OSError; EOFError if the file ends before."""
    buffer = (ctypes.c_ubyte * min(nbytes, _COMPARE_BYTES))()
    view = memoryview(buffer)
    while nbytes:
        got = os.preadv(fd, [view[: min(nbytes, _COMPARE_BYTES)]], offset)
        if not got:
            raise EOFError(f"the file ends at byte {offset}")
        if differ(ctypes.addressof(buffer), source, got):
            return False
        offset, source, nbytes = offset + got, source + got, nbytes - got
    return True


def zero(address: int, nbytes: int) -> None:
    """Releases the GIL."""
    ctypes.memset(address, 0, nbytes)


def differ(one: int, other: int, nbytes: int) -> bool:
    """Releases the GIL."""
    return bool(_libc.memcmp(one, other, nbytes))


def is_unwritten(address: int, nbytes: int) -> bool:
    """Return whether no page of a private mapping of a file was written to.

    False also if the system does not tell, as in some sandboxes. Reads 8 bytes for each page.
    """
    pages = nbytes // PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for page in range(0, pages, _PAGEMAP_PAGES):
                n = min(_PAGEMAP_PAGES, pages - page) * 8
                words = os.pread(pagemap.fileno(), n, (address // PAGE_BYTES + page) * 8)
                if len(words) < n or words[7::8].translate(None, _FILE_OR_ABSENT):
                    return False
    except OSError:
        return False
    return True


def view(address: int, nbytes: int) -> memoryview:
    """Return a writable buffer. It does not keep the memory mapped."""
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    return memoryview(array).cast("B")


_ANON = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE


def _mmap(at: int | None, nbytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    address = _libc.mmap(at, nbytes, prot, flags, fd, offset)
    if address == _FAILED or address is None:
        _raise()
    assert isinstance(address, int)
    return address


def _keep_here(address: int, nbytes: int) -> None:
    _madvise(address, nbytes, _MADV_DONTFORK)
    leave_out_of_cores(address, nbytes)


def _madvise(address: int, nbytes: int, advice: int) -> None:
    _check(_libc.madvise(address, nbytes, advice))


def _check(result: int) -> None:
    if result:
        _raise()


def _raise() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
