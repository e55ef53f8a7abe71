/* Initialisation, devices, contexts, and the checks at the start of every call. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fakecuda.h"

static pthread_mutex_t setup = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool initialised, forked;
static atomic_int sticky;
static int visible[MAX_DEVICES], visible_count;
static struct context contexts[MAX_DEVICES]; /* the primary ones, by device; under `setup` */
static __thread CUcontext current;
static __thread struct plan planned;
__thread bool in_host_function;

/* ---- the checks ---- */

void nap_us(long microseconds)
{
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

/* Keep the processor busy, like a driver's call: a sleep would be too long, and free. */
void spend_us(double microseconds)
{
    struct timespec start, now;
    if (microseconds <= 0) return;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((double)(now.tv_sec - start.tv_sec) * 1e6 +
           (double)(now.tv_nsec - start.tv_nsec) / 1e3 < microseconds);
}

CUresult sticky_error(void)
{
    return atomic_load(&sticky);
}

/* Rule: a fault on the device spoils the process. Every later call returns it, enqueued work does
 * not run any more, and every wait ends. The first error stays. */
void spoil(CUresult error)
{
    int none = 0;
    atomic_compare_exchange_strong(&sticky, &none, error);
    streams_wake();
}

/* The failure that a test injected into the last call on this thread; read once. */
struct plan take_plan(void)
{
    struct plan plan = planned;
    planned = (struct plan){0};
    return plan;
}

CUcontext current_context(void)
{
    return current;
}

static bool is_alive(CUcontext context)
{
    return __atomic_load_n(&context->retained, __ATOMIC_ACQUIRE) > 0;
}

static CUresult check_state(enum needs needs)
{
    /* Rule: a child made by fork cannot use the driver that its parent has initialised. */
    if (atomic_load(&forked) || !atomic_load(&initialised)) return CUDA_ERROR_NOT_INITIALIZED;
    /* Rule: a host function makes no CUDA calls. */
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    if (needs >= NEEDS_HEALTH && sticky_error()) return sticky_error();
    /* Rule: these work in the calling thread's context, and every thread has its own. */
    if (needs < NEEDS_CONTEXT) return CUDA_SUCCESS;
    if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
    return is_alive(current_context()) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult enter(const char *function, enum needs needs)
{
    trace(function, "");
    CUresult refused = check_state(needs);
    if (!refused) refused = captures_check(function);
    if (refused) return refused;
    planned = plan_for(function);
    if (planned.held && !planned.async) {
        trace(function, "held");
        while (still_held(function) && !sticky_error()) nap_us(1000);
        planned.held = NULL;
    }
    if (planned.now && planned.sticky) spoil(planned.now);
    return planned.now;
}

/* ---- initialisation ---- */

static void after_fork(void)
{
    if (atomic_load(&initialised)) atomic_store(&forked, true);
}

/* The device of one entry of CUDA_VISIBLE_DEVICES: an index, or the start of a UUID. */
static int parse_visible(const char *entry)
{
    char *end, text[41];
    if (strncmp(entry, "GPU-", 4)) {
        long index = strtol(entry, &end, 10);
        return end == entry || *end || index < 0 || index >= knobs()->devices ? -1 : (int)index;
    }
    for (int gpu = 0; gpu < knobs()->devices; gpu++) {
        account_uuid_text(gpu, text);
        if (!strncmp(text, entry, strlen(entry))) return gpu;
    }
    return -1;
}

/* Rule: CUDA_VISIBLE_DEVICES chooses and orders the devices; the first invalid entry ends the list,
 * and an empty list leaves no device. */
static void choose_visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    char *copy = list ? strdup(list) : NULL, *rest = NULL;
    visible_count = 0;
    if (!list)
        while (visible_count < knobs()->devices) {
            visible[visible_count] = visible_count;
            visible_count++;
        }
    for (char *entry = copy ? strtok_r(copy, ", ", &rest) : NULL; entry && visible_count < MAX_DEVICES;
         entry = strtok_r(NULL, ", ", &rest)) {
        int gpu = parse_visible(entry);
        if (gpu < 0) break;
        visible[visible_count++] = gpu;
    }
    free(copy);
}

EXPORT CUresult cuInit(unsigned flags)
{
    trace(__func__, "");
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&forked)) return CUDA_ERROR_NOT_INITIALIZED;
    struct plan plan = plan_for(__func__);
    if (plan.now) return plan.now;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&setup);
    if (!atomic_load(&initialised)) {
        choose_visible();
        if (!visible_count) result = CUDA_ERROR_NO_DEVICE;
        else if (!account_folder()) result = CUDA_ERROR_OPERATING_SYSTEM;
        else {
            pthread_atfork(NULL, NULL, after_fork);
            atomic_store(&initialised, true);
        }
    }
    pthread_mutex_unlock(&setup);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = knobs()->version;
    return CUDA_SUCCESS;
}

/* ---- devices ---- */

static bool is_device(CUdevice device)
{
    return device >= 0 && device < visible_count;
}

int device_count(void)
{
    return visible_count;
}

/* The number of the card behind a device of this process. */
int gpu_of(int device)
{
    return visible[device];
}

/* The reverse; -1 if the card is not visible here. */
int device_of(int gpu)
{
    for (int device = 0; device < visible_count; device++)
        if (visible[device] == gpu) return device;
    return -1;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER(NEEDS_INIT);
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = visible_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Fake GPU %d", gpu_of(device));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    account_uuid(gpu_of(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = knobs()->total;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
        *value = knobs()->read_only_pins;
        break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

int current_device(void)
{
    return current_context()->device;
}

/* The first retain makes the context, which takes memory of the device. */
static CUresult make_context(int device)
{
    struct context *context = &contexts[device];
    int fd = account_create(gpu_of(device), true, knobs()->context, knobs()->total, context->name);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    context->device = device;
    context->holding = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER(NEEDS_HEALTH);
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&setup);
    if (!contexts[device].retained) result = make_context(device);
    if (!result) {
        __atomic_add_fetch(&contexts[device].retained, 1, __ATOMIC_RELEASE);
        *context = &contexts[device];
    }
    pthread_mutex_unlock(&setup);
    return result;
}

/* Rule: a release without a retain fails; the last release destroys the context, its streams and
 * its events. It stays current on its threads, but is unusable there. */
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(NEEDS_INIT);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&setup);
    struct context *context = &contexts[device];
    if (!context->retained) result = CUDA_ERROR_INVALID_CONTEXT;
    else if (!__atomic_sub_fetch(&context->retained, 1, __ATOMIC_RELEASE)) {
        streams_abandon(device);
        close(context->holding);
        account_settle(gpu_of(device), context->name);
    }
    pthread_mutex_unlock(&setup);
    return result;
}

static CUresult check_context(CUcontext context)
{
    if (context < contexts || context >= contexts + MAX_DEVICES) return CUDA_ERROR_INVALID_CONTEXT;
    return is_alive(context) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* Rule: replaces the thread's current context; NULL removes it. */
EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(NEEDS_INIT);
    CUresult refused = context ? check_context(context) : CUDA_SUCCESS;
    if (refused) return refused;
    current = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(NEEDS_INIT);
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    *context = current_context();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER(NEEDS_CONTEXT);
    CUresult refused = captures_ask(__func__, NULL, true);
    return refused ? refused : streams_drain(current_device());
}

/* Free memory of the current context's device: all processes of this FAKECUDA_DIR count. */
EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(NEEDS_CONTEXT);
    if (!free_bytes || !total_bytes) return CUDA_ERROR_INVALID_VALUE;
    uint64_t total = knobs()->total, used = account_used(gpu_of(current_device()));
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
    return CUDA_SUCCESS;
}
