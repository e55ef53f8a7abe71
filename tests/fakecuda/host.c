/* Registered host memory, which makes copies asynchronous, and may hold flags. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakecuda.h"

struct registration {
    struct registration *next;
    uint64_t start;
    size_t nbytes;
    unsigned flags;
    bool owned; /* made by cuMemHostAlloc */
};

static pthread_mutex_t pins = PTHREAD_MUTEX_INITIALIZER;
static struct registration *registrations; /* under `pins` */
static uint64_t pinned_bytes;

/* ---- queries ---- */

static struct registration *find(uint64_t address)
{
    for (struct registration *each = registrations; each; each = each->next)
        if (address >= each->start && address - each->start < each->nbytes) return each;
    return NULL;
}

static bool overlaps(uint64_t start, uint64_t end)
{
    for (struct registration *each = registrations; each; each = each->next)
        if (each->start < end && each->start + each->nbytes > start) return true;
    return false;
}

static enum host_kind kind_locked(uint64_t address, size_t nbytes)
{
    if (!overlaps(address, address + nbytes)) return HOST_PAGEABLE;
    struct registration *whole = find(address);
    if (!whole || nbytes > whole->start + whole->nbytes - address) return HOST_MIXED;
    return whole->flags & CU_MEMHOSTREGISTER_READ_ONLY ? HOST_READ_ONLY : HOST_PINNED;
}

enum host_kind host_kind(uint64_t address, size_t nbytes)
{
    pthread_mutex_lock(&pins);
    enum host_kind kind = kind_locked(address, nbytes);
    pthread_mutex_unlock(&pins);
    return kind;
}

/* One word at once, ordered with the accesses of other threads and processes. */
void load_or_store(uint64_t *address, uint64_t *value, bool store)
{
    if (store) __atomic_store_n(address, *value, __ATOMIC_SEQ_CST);
    else *value = __atomic_load_n(address, __ATOMIC_SEQ_CST);
}

/* A word in registered memory; a fault if it is no longer registered, or not for writing. */
CUresult host_word(uint64_t address, uint64_t *value, bool store)
{
    pthread_mutex_lock(&pins);
    enum host_kind kind = kind_locked(address, sizeof *value);
    bool ok = kind == HOST_PINNED || (kind == HOST_READ_ONLY && !store);
    if (ok) load_or_store((void *)address, value, store);
    pthread_mutex_unlock(&pins);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* ---- registering ---- */

/* Whether all of a range is mapped, readable, and, if required, writable. */
static bool is_mapped_in_process(uint64_t start, uint64_t end, bool writable)
{
    char line[512], permissions[5];
    unsigned long long from, to;
    uint64_t at = start;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && at < end && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%llx-%llx %4s", &from, &to, permissions) != 3) continue;
        if (to <= at) continue;
        if (from > at || permissions[0] != 'r' || (writable && permissions[1] != 'w')) break;
        at = to;
    }
    if (maps) fclose(maps);
    return at >= end;
}

static CUresult check_registration(uint64_t start, size_t nbytes, unsigned flags)
{
    bool read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;
    if (!start || !nbytes || start + nbytes < start) return CUDA_ERROR_INVALID_VALUE;
    if (flags & ~(unsigned)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                            CU_MEMHOSTREGISTER_READ_ONLY))
        return CUDA_ERROR_INVALID_VALUE; /* also for I/O memory: there is none here */
    /* Rule: a device without the feature refuses the flag; without the flag, memory mapped
     * read-only is refused. */
    if (read_only && !knobs()->read_only_pins) return CUDA_ERROR_NOT_SUPPORTED;
    if (is_device_address(start)) return CUDA_ERROR_INVALID_VALUE;
    if (!is_mapped_in_process(start, start + nbytes, !read_only)) return CUDA_ERROR_INVALID_VALUE;
    /* Real drivers and kernels have limits of their own, which differ. */
    if (nbytes > knobs()->pin_max) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static CUresult add(uint64_t start, size_t nbytes, unsigned flags, bool owned)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t from = start / page * page, to = (start + nbytes + page - 1) / page * page;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&pins);
    /* Rule: no page is registered twice. */
    if (overlaps(from, to)) result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (nbytes > knobs()->pin_total - pinned_bytes) result = CUDA_ERROR_OUT_OF_MEMORY;
    else {
        struct registration *made = malloc(sizeof *made);
        if (!made) abort();
        *made = (struct registration){registrations, start, nbytes, flags, owned};
        registrations = made;
        pinned_bytes += nbytes;
        /* Copies wait meanwhile, like those that need a lock of the driver's. */
        nap_us((long)(knobs()->pin_s * 1e6 * (double)nbytes / (1 << 30)));
    }
    pthread_mutex_unlock(&pins);
    return result;
}

/* Remove the registration that starts at `address`; returns its size, or 0 if there is none. */
static size_t drop(uint64_t address, bool owned)
{
    size_t nbytes = 0;
    pthread_mutex_lock(&pins);
    struct registration **link = &registrations;
    while (*link && ((*link)->start != address || (*link)->owned != owned)) link = &(*link)->next;
    struct registration *found = *link;
    if (found) {
        *link = found->next;
        nbytes = found->nbytes;
        pinned_bytes -= nbytes;
        free(found);
    }
    pthread_mutex_unlock(&pins);
    return nbytes;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    CUresult refused = check_registration((uint64_t)address, nbytes, flags);
    return refused ? refused : add((uint64_t)address, nbytes, flags, false);
}

/* Rule: only by the very address that was registered. */
EXPORT CUresult cuMemHostUnregister(void *address)
{
    ENTER(NEEDS_CONTEXT);
    return drop((uint64_t)address, false) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (!address || !nbytes || flags & ~(unsigned)CU_MEMHOSTALLOC_ALL_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    void *made = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = add((uint64_t)made, nbytes, flags, true);
    if (result) munmap(made, nbytes);
    else *address = made;
    return result;
}

EXPORT CUresult cuMemFreeHost(void *address)
{
    ENTER(NEEDS_CONTEXT);
    size_t nbytes = drop((uint64_t)address, true);
    if (nbytes) munmap(address, nbytes);
    return nbytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Rule: the device's pointer to registered memory; the same number here, as on cards with
 * CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM. */
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *address, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (!pointer || flags || host_kind((uint64_t)address, 1) == HOST_PAGEABLE)
        return CUDA_ERROR_INVALID_VALUE;
    *pointer = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}
