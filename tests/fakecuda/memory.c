/* The driver's virtual memory management: allocations, reservations, mappings, access. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakecuda.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* One allocation as this process knows it. No handle's number is used again, so a second release is
 * detected. Freed when `refs` and `maps` are both 0. */
struct allocation {
    struct allocation *next;
    CUmemGenericAllocationHandle handle;
    int fd, device;
    size_t nbytes;
    int refs; /* cuMemCreate or import, cuMemRetainAllocationHandle */
    int maps;
    int handle_types;
    char name[ACCOUNT_NAME];
};

struct reservation {
    uint64_t start;
    size_t nbytes;
    bool plain; /* made by cuMemAlloc: the calls of this file refuse it */
};

struct mapping {
    uint64_t start;
    size_t nbytes;
    int access; /* CU_MEM_ACCESS_FLAGS_PROT_* of the allocation's own device */
    struct allocation *allocation;
};

/* `space` protects all of the following. Copies hold it for reading, a piece at a time. */
static pthread_rwlock_t space = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static struct allocation *allocations;
static CUmemGenericAllocationHandle last_handle = 0xfa4e0000;
static struct reservation *reservations;
static size_t reservation_count, reservation_room;
static struct mapping *mappings; /* by address */
static size_t mapping_count, mapping_room;

/* ---- tables ---- */

static void *grown(void *items, size_t count, size_t *room, size_t size)
{
    if (count < *room) return items;
    *room = *room ? *room * 2 : 64;
    void *more = realloc(items, *room * size);
    if (!more) abort();
    return more;
}

/* The allocation of a handle; NULL once all of its references are released. */
static struct allocation *find_allocation(CUmemGenericAllocationHandle handle)
{
    for (struct allocation *each = allocations; each; each = each->next)
        if (each->handle == handle) return each->refs ? each : NULL;
    return NULL;
}

static struct reservation *find_reservation(uint64_t address)
{
    for (size_t i = 0; i < reservation_count; i++)
        if (address >= reservations[i].start &&
            address - reservations[i].start < reservations[i].nbytes)
            return &reservations[i];
    return NULL;
}

/* Index of the first mapping that ends after `address`. */
static size_t mapping_after(uint64_t address)
{
    size_t low = 0, high = mapping_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle].start + mappings[middle].nbytes > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

static struct mapping *find_mapping(uint64_t address)
{
    size_t i = mapping_after(address);
    return i < mapping_count && mappings[i].start <= address ? &mappings[i] : NULL;
}

/* The number of mappings, from `first` on, that exactly make up the range; 0 if they do not. */
static size_t whole_mappings(uint64_t start, size_t nbytes, size_t *first)
{
    size_t i = *first = mapping_after(start);
    uint64_t at = start;
    while (i < mapping_count && mappings[i].start == at && at < start + nbytes)
        at += mappings[i++].nbytes;
    return at == start + nbytes ? i - *first : 0;
}

static struct allocation *add_allocation(int fd, int device, size_t nbytes, int types,
                                         const char *name)
{
    struct allocation *made = calloc(1, sizeof *made);
    if (!made) abort();
    *made = (struct allocation){allocations, ++last_handle, fd, device, nbytes, 1, 0, types, ""};
    memcpy(made->name, name, ACCOUNT_NAME);
    allocations = made;
    return made;
}

/* Free an allocation that has neither references nor mappings left. */
static void free_if_unused(struct allocation *allocation)
{
    if (allocation->refs || allocation->maps) return;
    struct allocation **link = &allocations;
    while (*link != allocation) link = &(*link)->next;
    *link = allocation->next;
    close(allocation->fd);
    account_settle(gpu_of(allocation->device), allocation->name);
    free(allocation);
}

/* ---- allocations ---- */

/* Rule: allocations are pinned memory of an existing device; other kinds are not emulated. */
static CUresult check_properties(const CUmemAllocationProp *properties)
{
    if (!properties) return CUDA_ERROR_INVALID_VALUE;
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->location.id < 0 || properties->location.id >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity,
                                              const CUmemAllocationProp *properties, int option)
{
    ENTER(NEEDS_HEALTH);
    if (!granularity || option < 0 || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return check_properties(properties);
}

static CUresult create_file(int device, size_t nbytes, char *name, int *fd)
{
    *fd = account_create(gpu_of(device), false, nbytes, knobs()->total, name);
    if (*fd >= 0) return CUDA_SUCCESS;
    if (*fd == -ENOMEM) return CUDA_ERROR_OUT_OF_MEMORY;
    account_complain("no file for device memory: %s", strerror(-*fd));
    return CUDA_ERROR_OPERATING_SYSTEM;
}

/* Rule: the size is a multiple of the granularity, and the device has that much left. */
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes,
                            const CUmemAllocationProp *properties, unsigned long long flags)
{
    ENTER(NEEDS_HEALTH);
    CUresult refused = check_properties(properties);
    if (refused) return refused;
    if (!handle || flags || !nbytes || nbytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    char name[ACCOUNT_NAME];
    int fd;
    CUresult failed = create_file(properties->location.id, nbytes, name, &fd);
    if (failed) return failed;
    pthread_rwlock_wrlock(&space);
    *handle = add_allocation(fd, properties->location.id, nbytes,
                             properties->requestedHandleTypes, name)->handle;
    pthread_rwlock_unlock(&space);
    return CUDA_SUCCESS;
}

/* Rule: each reference is released once; memory that is mapped or held elsewhere lives on. */
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(NEEDS_HEALTH);
    pthread_rwlock_wrlock(&space);
    struct allocation *allocation = find_allocation(handle);
    if (allocation) {
        allocation->refs--;
        free_if_unused(allocation);
    }
    pthread_rwlock_unlock(&space);
    return allocation ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Rule: the handle of mapped memory; one more reference, which must be released, too. */
EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    ENTER(NEEDS_HEALTH);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&space);
    struct mapping *mapping = handle ? find_mapping((uint64_t)address) : NULL;
    if (mapping && !find_reservation((uint64_t)address)->plain) {
        mapping->allocation->refs++;
        *handle = mapping->allocation->handle;
        result = CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&space);
    return result;
}

/* Rule: only memory made for it can be exported; each export is a descriptor of the caller's, and
 * keeps the memory until it is closed. */
EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             int type, unsigned long long flags)
{
    ENTER(NEEDS_HEALTH);
    if (!shareable || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&space);
    struct allocation *allocation = find_allocation(handle);
    if (allocation && (allocation->handle_types & type)) {
        int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 3);
        if (fd >= 0) *(int *)shareable = fd;
        result = fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&space);
    return result;
}

/* Rule: any process may import a descriptor, and pairs each import with a release; the descriptor
 * stays the caller's. The memory's device must be visible here. Only its maker can export it: an
 * H200 with driver 580.159.04 refuses the export of an import. */
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                               void *shareable, int type)
{
    ENTER(NEEDS_HEALTH);
    char name[ACCOUNT_NAME];
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    int given = (int)(intptr_t)shareable;
    int gpu = account_of(given, name);
    if (gpu < 0) return CUDA_ERROR_INVALID_VALUE;
    if (device_of(gpu) < 0) return CUDA_ERROR_INVALID_DEVICE;
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 3);
    off_t nbytes = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_rwlock_wrlock(&space);
    *handle = add_allocation(fd, device_of(gpu), (size_t)nbytes, 0, name)->handle;
    pthread_rwlock_unlock(&space);
    return CUDA_SUCCESS;
}

/* ---- reservations ---- */

static void *map_nothing(uint64_t start, size_t nbytes, int flags)
{
    return mmap((void *)start, nbytes, PROT_NONE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* Reserved address space: at the hint if that is free, else anywhere. */
static uint64_t reserve_space(size_t nbytes, size_t alignment, uint64_t hint)
{
    if (hint && hint % alignment == 0) {
        void *there = map_nothing(hint, nbytes, MAP_FIXED_NOREPLACE);
        if (there == (void *)hint) return hint;
        if (there != MAP_FAILED) munmap(there, nbytes);
    }
    char *found = map_nothing(0, nbytes + alignment, 0);
    if ((void *)found == MAP_FAILED) return 0;
    uint64_t from = (uint64_t)found, end = from + nbytes + alignment;
    uint64_t start = (from + alignment - 1) / alignment * alignment;
    if (start > from) munmap(found, start - from);
    if (end > start + nbytes) munmap((void *)(start + nbytes), end - start - nbytes);
    return start;
}

static CUresult reserve(CUdeviceptr *address, size_t nbytes, size_t alignment, uint64_t hint,
                        bool plain)
{
    uint64_t start = reserve_space(nbytes, alignment < GRANULARITY ? GRANULARITY : alignment, hint);
    if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
    reservations = grown(reservations, reservation_count, &reservation_room, sizeof *reservations);
    reservations[reservation_count++] = (struct reservation){start, nbytes, plain};
    *address = start;
    return CUDA_SUCCESS;
}

/* Rule: size and hint are multiples of the page size (of the granularity here, since whole
 * allocations are mapped), the alignment is a power of two or 0. */
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment,
                                    CUdeviceptr hint, unsigned long long flags)
{
    ENTER(NEEDS_HEALTH);
    if (!address || !nbytes || nbytes % GRANULARITY || hint % GRANULARITY || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&space);
    CUresult result = reserve(address, nbytes, alignment, hint, false);
    pthread_rwlock_unlock(&space);
    return result;
}

static bool has_mappings(uint64_t start, size_t nbytes)
{
    size_t i = mapping_after(start);
    return i < mapping_count && mappings[i].start < start + nbytes;
}

static void drop_reservation(struct reservation *reservation)
{
    munmap((void *)reservation->start, reservation->nbytes);
    *reservation = reservations[--reservation_count];
}

/* Rule: exactly a reservation, without mappings in it. */
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes)
{
    ENTER(NEEDS_HEALTH);
    pthread_rwlock_wrlock(&space);
    struct reservation *found = find_reservation(address);
    bool ok = found && found->start == address && found->nbytes == nbytes && !found->plain &&
              !has_mappings(address, nbytes);
    if (ok) drop_reservation(found);
    pthread_rwlock_unlock(&space);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- mappings ---- */

/* Put an allocation at an address, without access. The range is reserved and unmapped. */
static CUresult map_there(uint64_t start, struct allocation *allocation)
{
    void *there = mmap((void *)start, allocation->nbytes, PROT_NONE,
                       MAP_SHARED | MAP_FIXED | MAP_NORESERVE, allocation->fd, 0);
    if (there == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(there, allocation->nbytes, MADV_DONTFORK);
    mappings = grown(mappings, mapping_count, &mapping_room, sizeof *mappings);
    size_t i = mapping_after(start);
    memmove(&mappings[i + 1], &mappings[i], (mapping_count++ - i) * sizeof *mappings);
    mappings[i] = (struct mapping){start, allocation->nbytes, 0, allocation};
    allocation->maps++;
    return CUDA_SUCCESS;
}

/* Rules: offset 0 and exactly the allocation's full size, so that an allocation is the unit of
 * mapping; inside one reservation; nothing mapped there; aligned to the granularity. */
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    ENTER(NEEDS_HEALTH);
    if (offset || flags || !nbytes || address % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&space);
    struct allocation *allocation = find_allocation(handle);
    struct reservation *target = find_reservation(address);
    if (allocation && target && !target->plain && nbytes == allocation->nbytes &&
        nbytes <= target->nbytes - (address - target->start) && !has_mappings(address, nbytes))
        result = map_there(address, allocation);
    pthread_rwlock_unlock(&space);
    if (!result) spend_us(knobs()->map_us);
    return result;
}

static void unmap(size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++) {
        if (map_nothing(mappings[i].start, mappings[i].nbytes, MAP_FIXED) == MAP_FAILED) abort();
        mappings[i].allocation->maps--;
        free_if_unused(mappings[i].allocation);
    }
    mapping_count -= count;
    memmove(&mappings[first], &mappings[first + count],
            (mapping_count - first) * sizeof *mappings);
}

/* Rule: whole mappings only. An H200 with driver 580.159.04 takes several adjacent ones in a call;
 * that is not documented, and FAKECUDA_UNMAP_ONE refuses it. */
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes)
{
    ENTER(NEEDS_HEALTH);
    size_t first;
    pthread_rwlock_wrlock(&space);
    struct reservation *reservation = find_reservation(address);
    size_t count = reservation && !reservation->plain ? whole_mappings(address, nbytes, &first) : 0;
    bool ok = count && !(count > 1 && knobs()->unmap_one);
    if (ok) unmap(first, count);
    pthread_rwlock_unlock(&space);
    if (ok) spend_us((double)count * knobs()->unmap_us);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- access ---- */

/* Set the access of one mapping; also for the CPU, so that a stray access is a SIGSEGV. */
static void set_access(struct mapping *mapping, int access)
{
    int protection = access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                     : access == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                  : PROT_NONE;
    if (mprotect((void *)mapping->start, mapping->nbytes, protection)) abort();
    mapping->access = access;
}

/* Rule: access is for existing devices; here only for the memory's own, as there are no peers. */
static CUresult check_access(const CUmemAccessDesc *wanted, const struct mapping *mapping)
{
    if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (wanted->location.id != mapping->allocation->device) return CUDA_ERROR_INVALID_DEVICE;
    if (wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* Rule: a fully mapped range of whole mappings; an error changes nothing. */
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *wanted,
                               size_t count)
{
    ENTER(NEEDS_HEALTH);
    size_t first;
    if (!wanted || count != 1) return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&space);
    size_t mapped = whole_mappings(address, nbytes, &first);
    CUresult result = mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = first; i < first + mapped && !result; i++)
        result = check_access(wanted, &mappings[i]);
    for (size_t i = first; i < first + mapped && !result; i++)
        set_access(&mappings[i], wanted->flags);
    pthread_rwlock_unlock(&space);
    if (!result) spend_us((double)mapped * knobs()->access_us);
    if (!result) trace("accessible", "");
    return result;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                               CUdeviceptr address)
{
    ENTER(NEEDS_HEALTH);
    if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&space);
    struct mapping *mapping = find_mapping(address);
    if (mapping)
        *flags = location->id == mapping->allocation->device ? (unsigned)mapping->access : 0;
    pthread_rwlock_unlock(&space);
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- plain allocations, as an application's own allocator makes them ---- */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes)
{
    ENTER(NEEDS_CONTEXT);
    char name[ACCOUNT_NAME];
    int fd, device = current_device();
    if (!address || !nbytes) return CUDA_ERROR_INVALID_VALUE;
    size_t whole = (nbytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    CUresult result = create_file(device, whole, name, &fd);
    if (result) return result;
    pthread_rwlock_wrlock(&space);
    struct allocation *allocation = add_allocation(fd, device, whole, 0, name);
    result = reserve(address, whole, 0, 0, true);
    if (!result) result = map_there(*address, allocation);
    if (!result) set_access(find_mapping(*address), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    allocation->refs = 0;
    free_if_unused(allocation);
    pthread_rwlock_unlock(&space);
    return result;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(NEEDS_CONTEXT);
    size_t first;
    CUresult drained = address ? streams_drain(current_device()) : CUDA_SUCCESS;
    if (drained || !address) return drained;
    pthread_rwlock_wrlock(&space);
    struct reservation *found = find_reservation(address);
    bool ok = found && found->plain && found->start == address;
    if (ok) {
        size_t count = whole_mappings(found->start, found->nbytes, &first);
        unmap(first, count);
        drop_reservation(found);
    }
    pthread_rwlock_unlock(&space);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- access of streams through the mappings ---- */

bool is_device_address(uint64_t address)
{
    pthread_rwlock_rdlock(&space);
    bool found = find_reservation(address) != NULL;
    pthread_rwlock_unlock(&space);
    return found;
}

bool is_mapped(uint64_t address, size_t nbytes)
{
    pthread_rwlock_rdlock(&space);
    size_t i = mapping_after(address);
    uint64_t at = address;
    while (i < mapping_count && mappings[i].start <= at && at < address + nbytes) {
        at = mappings[i].start + mappings[i].nbytes;
        i++;
    }
    pthread_rwlock_unlock(&space);
    return at >= address + nbytes;
}

/* The device of a mapped address; -1 if there is none. */
int device_of_address(uint64_t address)
{
    pthread_rwlock_rdlock(&space);
    struct mapping *mapping = find_mapping(address);
    int device = mapping ? mapping->allocation->device : -1;
    pthread_rwlock_unlock(&space);
    return device;
}

/* The mapping at an address, if the device has this access to it. */
static struct mapping *accessible(uint64_t address, bool write)
{
    int needed = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    struct mapping *mapping = find_mapping(address);
    return mapping && (mapping->access & needed) == needed ? mapping : NULL;
}

/* Copy between `host` and one piece of a mapping; returns the bytes copied, 0 for a fault. It uses
 * the file, not the address, so that missing host memory is an error and not a SIGSEGV. */
static size_t transfer_piece(uint64_t address, char *host, size_t nbytes, bool in)
{
    pthread_rwlock_rdlock(&space);
    struct mapping *mapping = accessible(address, in);
    ssize_t done = 0;
    if (mapping) {
        uint64_t offset = address - mapping->start;
        size_t most = mapping->nbytes - offset;
        if (nbytes > most) nbytes = most;
        int fd = mapping->allocation->fd;
        off_t at = (off_t)offset;
        if (knobs()->hollow) done = (ssize_t)nbytes;
        else done = in ? pwrite(fd, host, nbytes, at) : pread(fd, host, nbytes, at);
    }
    pthread_rwlock_unlock(&space);
    if (done < 0) account_complain("a copy at %p: %s", (void *)host, strerror(errno));
    return done < 0 ? 0 : (size_t)done;
}

/* Rule: the check of each byte is at its copy. A byte that is not mapped then, or not with that
 * access, is a fault, also if it was unmapped in the middle of the copy. */
CUresult device_transfer(uint64_t address, char *host, size_t nbytes, bool in)
{
    while (nbytes) {
        size_t done = transfer_piece(address, host, nbytes < PIECE ? nbytes : PIECE, in);
        if (!done) return CUDA_ERROR_ILLEGAL_ADDRESS;
        address += done;
        host += done;
        nbytes -= done;
    }
    return CUDA_SUCCESS;
}

/* One aligned word, loaded or stored at once. */
CUresult device_word(uint64_t address, uint64_t *value, bool store)
{
    pthread_rwlock_rdlock(&space);
    bool ok = accessible(address, store) != NULL;
    if (ok) load_or_store((void *)address, value, store);
    pthread_rwlock_unlock(&space);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}
