/* Device memory as files, counted across processes.
 *
 * Rule of the driver kept here: memory is freed when no handle, no mapping and no exported
 * descriptor of it remains, in any process.
 *
 * Each allocation is a named file in FAKECUDA_DIR/gpuN/, and the one open file description that
 * made it holds an flock. Handles, exported descriptors, descriptors under way in a socket,
 * imports and mappings all share that description, and the kernel drops an flock with the last
 * reference to it, however the processes end. So a file is live exactly as long as another process
 * or handle holds its lock; a file whose lock is free is a leftover, and the next look unlinks it.
 *
 * Every look and change takes `gpuN.lock`. That file also holds a count of bytes, so that a new
 * allocation need not look at all the others. The count is never too low, and too high only after
 * processes ended without freeing. A full look corrects it before an allocation fails.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakecuda.h"

typedef void visitor(const char *name, uint64_t nbytes, void *argument);

void account_complain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("fakecuda: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

/* The folder of all device memory; NULL, with a message, if it does not exist. */
const char *account_folder(void)
{
    static __thread char resolved[PATH_MAX];
    const char *named = getenv("FAKECUDA_DIR");
    if (named && realpath(named, resolved)) return resolved;
    account_complain("FAKECUDA_DIR must name an existing folder, not %s", named ? named : "nothing");
    return NULL;
}

/* Open FAKECUDA_DIR/gpu<N><suffix>, or -1. */
static int open_beside(int gpu, const char *suffix, int flags)
{
    char path[PATH_MAX + 64];
    const char *folder = account_folder();
    if (!folder) return -1;
    snprintf(path, sizeof path, "%s/gpu%d%s", folder, gpu, suffix);
    return open(path, flags | O_CLOEXEC, 0600);
}

/* Open the folder of a device's memory; make it first if necessary. */
static int open_memory(int gpu)
{
    char path[PATH_MAX + 64];
    const char *folder = account_folder();
    if (!folder) return -1;
    snprintf(path, sizeof path, "%s/gpu%d", folder, gpu);
    if (mkdir(path, 0700) && errno != EEXIST) return -1;
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Take the lock of a device's accounts. A new description each time, so threads exclude each other,
 * too; closing it releases the lock. */
static int lock_accounts(int gpu)
{
    int lock = open_beside(gpu, ".lock", O_RDWR | O_CREAT);
    if (lock < 0) return -1;
    while (flock(lock, LOCK_EX))
        if (errno != EINTR) {
            close(lock);
            return -1;
        }
    return lock;
}

static uint64_t read_count(int lock)
{
    uint64_t count = 0;
    if (pread(lock, &count, sizeof count, 0) != sizeof count) return 0;
    return count;
}

static void write_count(int lock, uint64_t count)
{
    if (pwrite(lock, &count, sizeof count, 0) != sizeof count)
        account_complain("cannot write the count: %s", strerror(errno));
}

/* Whether any process still holds `name`; if none does, unlink it. */
static bool is_live(int folder, const char *name, uint64_t *nbytes)
{
    struct stat status;
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    *nbytes = fstat(fd, &status) ? 0 : (uint64_t)status.st_size;
    bool live = flock(fd, LOCK_EX | LOCK_NB) != 0;
    if (!live) unlinkat(folder, name, 0);
    close(fd);
    return live;
}

/* Look at every file, with the lock held: visit the live ones, unlink the others. */
static uint64_t look(int folder, visitor *visit, void *argument)
{
    uint64_t used = 0, nbytes;
    int own = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = own < 0 ? NULL : fdopendir(own);
    if (!listing) {
        account_complain("cannot list the memory: %s", strerror(errno));
        if (own >= 0) close(own);
        return UINT64_MAX / 2;
    }
    for (struct dirent *entry; (entry = readdir(listing));) {
        if (entry->d_name[0] == '.' || !is_live(folder, entry->d_name, &nbytes)) continue;
        used += nbytes;
        if (visit) visit(entry->d_name, nbytes, argument);
    }
    closedir(listing);
    return used;
}

/* A full look under the lock: bytes in use; corrects the count. */
static uint64_t recount(int gpu, visitor *visit, void *argument)
{
    int folder = open_memory(gpu);
    int lock = folder < 0 ? -1 : lock_accounts(gpu);
    uint64_t used = UINT64_MAX / 2;
    if (lock >= 0) {
        used = look(folder, visit, argument);
        write_count(lock, used);
        close(lock);
    }
    if (folder >= 0) close(folder);
    return used;
}

/* Make the file, sparse and locked. Hold the accounts' lock: otherwise a look might take the new
 * file for a leftover before its lock is taken. */
static int make_file(int folder, bool context, uint64_t nbytes, char *name)
{
    static unsigned serial;
    int fd;
    do {
        snprintf(name, ACCOUNT_NAME, "%d.%u.%s", (int)getpid(),
                 __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED), context ? "context" : "memory");
        fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    } while (fd < 0 && errno == EEXIST);
    if (fd < 0) return -errno;
    if (!flock(fd, LOCK_EX | LOCK_NB) && !ftruncate(fd, (off_t)nbytes)) return fd;
    int error = errno;
    unlinkat(folder, name, 0);
    close(fd);
    return -error;
}

/* Make `nbytes` of device memory. Returns its descriptor and fills in its `name`; -ENOMEM if the
 * sum would exceed `total`, or another negative errno. */
int account_create(int gpu, bool context, uint64_t nbytes, uint64_t total, char *name)
{
    int folder = open_memory(gpu);
    int lock = folder < 0 ? -1 : lock_accounts(gpu);
    int fd = -EIO;
    if (lock >= 0) {
        uint64_t used = read_count(lock);
        if (used + nbytes > total) used = look(folder, NULL, NULL);
        fd = used + nbytes > total ? -ENOMEM : make_file(folder, context, nbytes, name);
        write_count(lock, fd < 0 ? used : used + nbytes);
        close(lock);
    }
    if (folder >= 0) close(folder);
    return fd;
}

/* After letting go of `name`: unlink it at once if that was the last reference. */
void account_settle(int gpu, const char *name)
{
    uint64_t nbytes = 0;
    int folder = open_memory(gpu);
    int lock = folder < 0 ? -1 : lock_accounts(gpu);
    if (lock >= 0) {
        uint64_t used = read_count(lock);
        if (!faccessat(folder, name, F_OK, 0) && !is_live(folder, name, &nbytes))
            write_count(lock, used > nbytes ? used - nbytes : 0);
        close(lock);
    }
    if (folder >= 0) close(folder);
}

/* Bytes of a device in use. */
uint64_t account_used(int gpu)
{
    return recount(gpu, NULL, NULL);
}

struct list {
    struct holding *items;
    int room, length;
};

static void add_to_list(const char *name, uint64_t nbytes, void *argument)
{
    struct list *list = argument;
    int pid = 0;
    char suffix[16] = "";
    if (sscanf(name, "%d.%*u.%15s", &pid, suffix) != 2) return;
    enum holding_kind kind = !strcmp(suffix, "context") ? CONTEXT
                             : !strcmp(suffix, "mps")   ? MPS_CLIENT
                                                        : MEMORY;
    if (list->length < list->room)
        list->items[list->length] = (struct holding){pid, kind, nbytes};
    list->length++;
}

/* The holdings of a device. Returns their number, even if `room` was too little. */
int account_list(int gpu, struct holding *items, int room)
{
    struct list list = {items, room, 0};
    recount(gpu, add_to_list, &list);
    return list.length;
}

/* The device whose memory a descriptor is, with the file's name; -1 if it is not the fake's. */
int account_of(int fd, char *name)
{
    char link[64], path[PATH_MAX + 1];
    const char *folder = account_folder();
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (!folder || length <= 0) return -1;
    path[length] = 0;
    size_t start = strlen(folder);
    char suffix[8] = "", found[ACCOUNT_NAME] = "";
    int gpu = -1;
    if (strncmp(path, folder, start)) return -1;
    if (sscanf(path + start, "/gpu%d/%63s", &gpu, found) != 2) return -1;
    if (sscanf(found, "%*d.%*u.%7s", suffix) != 1 || strcmp(suffix, "memory")) return -1;
    memcpy(name, found, ACCOUNT_NAME);
    return gpu;
}

/* Open the lock of one copy engine of a device; the caller locks it with flock. */
int account_engine(int gpu, bool in)
{
    return open_beside(gpu, in ? ".engine-in" : ".engine-out", O_RDWR | O_CREAT);
}

/* Devices have fixed UUIDs, as real ones do; the last byte is the device's number. */
void account_uuid(int gpu, unsigned char uuid[16])
{
    static const unsigned char base[16] = {0xfa, 0x4e, 0xc0, 0xda, 0x00, 0x13, 0x40, 0x00,
                                           0x80, 0x00, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 0x00};
    memcpy(uuid, base, sizeof base);
    uuid[15] = (unsigned char)gpu;
}

/* The same in the form for people: GPU-fa4ec0da-0013-4000-8000-5a5a5a5a5a00. */
void account_uuid_text(int gpu, char text[41])
{
    unsigned char uuid[16];
    account_uuid(gpu, uuid);
    int at = snprintf(text, 41, "GPU-");
    for (int i = 0; i < 16; i++)
        at += snprintf(text + at, (size_t)(41 - at), "%s%02x",
                       i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}
