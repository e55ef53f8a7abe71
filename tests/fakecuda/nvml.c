/* libnvidia-ml.so.1: the part of NVML that lists the users of a card, on the driver's files.
 *
 * Rule: NVML sees whole cards, independent of CUDA_VISIBLE_DEVICES, and all processes that have a
 * context, of any user.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakecuda.h"

typedef int nvmlReturn_t;
typedef struct card *nvmlDevice_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
};

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

#define NOT_AVAILABLE (~0ull)
#define NO_INSTANCE (~0u)
#define MAX_HOLDINGS 4096

static struct card {
    int gpu;
} cards[MAX_DEVICES];
static int initialised;

#define ENTER_NVML() \
    do { if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE)) return NVML_ERROR_UNINITIALIZED; } while (0)

static unsigned long long knob(const char *name, unsigned long long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static int card_count(void)
{
    unsigned long long count = knob("FAKECUDA_DEVICES", 1);
    return count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}

static bool is_card(nvmlDevice_t card)
{
    return card >= cards && card < cards + card_count();
}

/* ---- the library ---- */

/* FAKECUDA_NVML is the error with which NVML does not start: 9, the driver is not loaded; 12, the
 * library is missing; 18, it does not match the driver. */
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    nvmlReturn_t broken = (nvmlReturn_t)knob("FAKECUDA_NVML", 0);
    if (broken) return broken;
    for (int gpu = 0; gpu < MAX_DEVICES; gpu++) cards[gpu].gpu = gpu;
    __atomic_add_fetch(&initialised, 1, __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    ENTER_NVML();
    __atomic_sub_fetch(&initialised, 1, __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t error)
{
    switch (error) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 12: return "Library Not Found";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

/* Rule: text goes into the caller's buffer whole, or not at all. */
static nvmlReturn_t give_text(char *buffer, unsigned length, const char *text)
{
    if (!buffer) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}

/* ---- cards ---- */

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *card)
{
    ENTER_NVML();
    if (!card || index >= (unsigned)card_count()) return NVML_ERROR_INVALID_ARGUMENT;
    *card = &cards[index];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *card)
{
    ENTER_NVML();
    char text[41];
    if (!uuid || !card) return NVML_ERROR_INVALID_ARGUMENT;
    for (int gpu = 0; gpu < card_count(); gpu++) {
        account_uuid_text(gpu, text);
        if (strcmp(text, uuid)) continue;
        *card = &cards[gpu];
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t card, char *uuid, unsigned length)
{
    ENTER_NVML();
    char text[41];
    if (!is_card(card)) return NVML_ERROR_INVALID_ARGUMENT;
    account_uuid_text(card->gpu, text);
    return give_text(uuid, length, text);
}

/* FAKECUDA_MIG: 0 off, 1 on, "none" for cards without MIG. */
EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t card, unsigned *now, unsigned *pending)
{
    ENTER_NVML();
    const char *text = getenv("FAKECUDA_MIG");
    if (!is_card(card) || !now || !pending) return NVML_ERROR_INVALID_ARGUMENT;
    if (text && !strcmp(text, "none")) return NVML_ERROR_NOT_SUPPORTED;
    *now = *pending = knob("FAKECUDA_MIG", 0) != 0;
    return NVML_SUCCESS;
}

/* ---- memory ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t card, nvmlMemory_t *memory)
{
    ENTER_NVML();
    if (!is_card(card) || !memory) return NVML_ERROR_INVALID_ARGUMENT;
    memory->total = knob("FAKECUDA_TOTAL", 1ull << 30);
    memory->used = account_used(card->gpu);
    if (memory->used > memory->total) memory->used = memory->total;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

/* ---- processes ---- */

/* The card's memory that a process has allocated. FAKECUDA_NVML_USE=0: unknown, as in some
 * containers. */
static unsigned long long use_of(pid_t pid, const struct holding *holdings, int count)
{
    unsigned long long nbytes = 0;
    if (!knob("FAKECUDA_NVML_USE", 1)) return NOT_AVAILABLE;
    for (int i = 0; i < count; i++)
        if (holdings[i].pid == pid) nbytes += holdings[i].nbytes;
    return nbytes;
}

/* Rule: if there is too little room, only the count is returned; with no process running a count of
 * 0 is enough. */
static nvmlReturn_t give_processes(nvmlDevice_t card, unsigned *count, nvmlProcessInfo_t *processes,
                                   enum holding_kind kind)
{
    static struct holding holdings[MAX_HOLDINGS];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (!is_card(card) || !count) return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    unsigned room = processes ? *count : 0, found = 0;
    int length = account_list(card->gpu, holdings, MAX_HOLDINGS);
    if (length > MAX_HOLDINGS) length = MAX_HOLDINGS;
    for (int i = 0; i < length; i++) {
        if (holdings[i].kind != kind) continue;
        if (found < room)
            processes[found] = (nvmlProcessInfo_t){
                (unsigned)holdings[i].pid, use_of(holdings[i].pid, holdings, length), NO_INSTANCE,
                NO_INSTANCE};
        found++;
    }
    pthread_mutex_unlock(&lock);
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t card, unsigned *count,
                                                            nvmlProcessInfo_t *processes)
{
    ENTER_NVML();
    return give_processes(card, count, processes, CONTEXT);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t card, unsigned *count,
                                                               nvmlProcessInfo_t *processes)
{
    ENTER_NVML();
    return give_processes(card, count, processes, MPS_CLIENT);
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t card, unsigned *count,
                                                             nvmlProcessInfo_t *processes)
{
    ENTER_NVML();
    (void)processes;
    if (!is_card(card) || !count) return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

/* The name that a test gave a process, in lines "pid name" of FAKECUDA_DIR/names. */
static bool given_name(unsigned pid, char *name, size_t room)
{
    char path[4200], line[512];
    unsigned named;
    int start;
    const char *folder = account_folder();
    snprintf(path, sizeof path, "%s/names", folder ? folder : "");
    FILE *names = fopen(path, "re");
    bool found = false;
    while (names && !found && fgets(line, sizeof line, names)) {
        line[strcspn(line, "\n")] = 0;
        found = sscanf(line, "%u %n", &named, &start) == 1 && named == pid;
        if (found) snprintf(name, room, "%s", line + start);
    }
    if (names) fclose(names);
    return found;
}

/* Rule: the path of a process's program, as far as it is visible. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    ENTER_NVML();
    char path[64], text[512] = "";
    if (given_name(pid, text, sizeof text)) return give_text(name, length, text);
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *commands = fopen(path, "re");
    size_t read = commands ? fread(text, 1, sizeof text - 1, commands) : 0;
    if (commands) fclose(commands);
    text[read] = 0; /* arguments end in zeroes: this leaves the program */
    return read ? give_text(name, length, text) : NVML_ERROR_NOT_FOUND;
}
