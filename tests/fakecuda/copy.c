/* Copies, fills and flags: the calls, and their operations on a stream. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "fakecuda.h"

/* ---- copy engines ---- */

/* Rule: a device has one copy engine for each direction: copies in one direction take turns, also
 * between processes, and the two directions run in parallel. Only if a rate is set: otherwise
 * copies are too short to queue for. */
static struct engine {
    pthread_mutex_t turn; /* among the threads of this process */
    int lock;             /* among processes; 0: not opened yet */
} engines[MAX_DEVICES][2];
static pthread_once_t made_engines = PTHREAD_ONCE_INIT;

static void make_engines(void)
{
    for (int gpu = 0; gpu < MAX_DEVICES; gpu++)
        for (int in = 0; in < 2; in++) pthread_mutex_init(&engines[gpu][in].turn, NULL);
}

static double rate(bool in)
{
    return in ? knobs()->gbps_in : knobs()->gbps_out;
}

/* In the lock's file: the time until which the engine is busy with the copies begun so far. */
static struct timespec busy_until(const struct engine *engine)
{
    struct timespec until = {0, 0};
    if (pread(engine->lock, &until, sizeof until, 0) < 0) account_complain("an engine's file");
    return until;
}

static void keep_busy(const struct engine *engine, const struct timespec *until)
{
    if (pwrite(engine->lock, until, sizeof *until, 0) < 0) account_complain("an engine's file");
}

static struct engine *take_engine(uint64_t address, bool in)
{
    int device = device_of_address(address);
    if (rate(in) <= 0 || device < 0) return NULL;
    pthread_once(&made_engines, make_engines);
    struct engine *engine = &engines[gpu_of(device)][in];
    pthread_mutex_lock(&engine->turn);
    if (!engine->lock) engine->lock = account_engine(gpu_of(device), in);
    while (flock(engine->lock, LOCK_EX) && errno == EINTR) {}
    return engine;
}

static void give_engine(struct engine *engine)
{
    if (!engine) return;
    flock(engine->lock, LOCK_UN);
    pthread_mutex_unlock(&engine->turn);
}

static struct timespec later(struct timespec one, struct timespec other)
{
    bool second = one.tv_sec == other.tv_sec ? one.tv_nsec < other.tv_nsec
                                             : one.tv_sec < other.tv_sec;
    return second ? other : one;
}

/* The begin of a copy: when it could run, and not when this thread had a processor. A copy engine
 * needs none. */
static struct timespec begin(const struct engine *engine, const struct operation *operation)
{
    return engine ? later(busy_until(engine), operation->queued) : operation->queued;
}

/* The time at which `done` bytes are copied, of a copy that began at `start`. */
static struct timespec due(const struct timespec *start, size_t done, double gbps)
{
    double seconds = (double)done / (gbps * 1e9);
    struct timespec end = *start;
    end.tv_sec += (time_t)seconds;
    end.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (end.tv_nsec >= 1000000000) {
        end.tv_nsec -= 1000000000;
        end.tv_sec++;
    }
    return end;
}

static void sleep_until(const struct timespec *end)
{
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, end, NULL) == EINTR) {}
}

/* ---- copies: operations ---- */

/* Rule: host memory registered when a copy was enqueued must stay so until the copy is done. */
static bool host_is_ready(uint64_t address, size_t nbytes, bool in, bool pinned)
{
    if (!pinned) return true;
    enum host_kind kind = host_kind(address, nbytes);
    return kind == HOST_PINNED || (kind == HOST_READ_ONLY && in);
}

static CUresult copy_with_host(const struct operation *operation, bool in)
{
    uint64_t device = in ? operation->target : operation->source;
    uint64_t host = in ? operation->source : operation->target;
    if (operation->staging) host = (uint64_t)operation->staging;
    CUresult result = CUDA_SUCCESS;
    struct timespec start, end;
    size_t most = knobs()->hollow ? 16 * PIECE : PIECE;
    struct engine *engine = take_engine(device, in);
    start = begin(engine, operation);
    for (size_t done = 0; done < operation->nbytes && !result && !waiting_is_over();) {
        size_t left = operation->nbytes - done, piece = left < most ? left : most;
        if (!host_is_ready(host + done, piece, in, operation->pinned))
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
        else result = device_transfer(device + done, (char *)(host + done), piece, in);
        done += piece;
        if (!engine) continue;
        end = due(&start, done, rate(in));
        keep_busy(engine, &end);
        sleep_until(&end);
    }
    give_engine(engine);
    return result;
}

/* Within device memory, through a buffer. The caller must not let ranges overlap, as with the
 * driver. */
static CUresult copy_within(const struct operation *operation)
{
    static __thread char buffer[64 << 10];
    CUresult result = CUDA_SUCCESS;
    for (size_t done = 0; done < operation->nbytes && !result && !waiting_is_over();) {
        size_t left = operation->nbytes - done;
        size_t piece = left < sizeof buffer ? left : sizeof buffer;
        result = device_transfer(operation->source + done, buffer, piece, false);
        if (!result) result = device_transfer(operation->target + done, buffer, piece, true);
        done += piece;
    }
    return result;
}

static CUresult fill(const struct operation *operation)
{
    static __thread char buffer[64 << 10];
    CUresult result = CUDA_SUCCESS;
    memset(buffer, (int)operation->value, sizeof buffer);
    for (size_t done = 0; done < operation->nbytes && !result && !waiting_is_over();) {
        size_t left = operation->nbytes - done;
        size_t piece = left < sizeof buffer ? left : sizeof buffer;
        result = device_transfer(operation->target + done, buffer, piece, true);
        done += piece;
    }
    return result;
}

CUresult perform_copy(struct operation *operation)
{
    switch (operation->kind) {
    case COPY_IN: return copy_with_host(operation, true);
    case COPY_OUT: return copy_with_host(operation, false);
    case COPY_WITHIN: return copy_within(operation);
    default: return fill(operation);
    }
}

/* ---- copies: calls ---- */

/* Rule: the device side is a device address. If it is reserved but not mapped, or not accessible,
 * the copy fails only when it runs. */
static CUresult check_device_side(uint64_t address)
{
    return is_device_address(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Rules: registered memory is read later, on the stream; other memory has been read when the call
 * returns. Small pieces are staged here, and the call waits for larger copies; the driver documents
 * neither. A range that is only partly registered, or in two registrations, is refused: so does an
 * H200 with driver 580.159.04. */
static CUresult copy_in(CUdeviceptr target, const void *source, size_t nbytes, CUstream stream,
                        bool wait)
{
    CUresult refused = check_device_side(target);
    enum host_kind kind = host_kind((uint64_t)source, nbytes);
    if (refused || kind == HOST_MIXED) return CUDA_ERROR_INVALID_VALUE;
    struct operation copy = {.kind = COPY_IN, .target = target, .source = (uint64_t)source,
                             .nbytes = nbytes, .pinned = kind != HOST_PAGEABLE};
    if (!copy.pinned && !wait && nbytes <= PIECE) {
        copy.staging = malloc(nbytes);
        if (!copy.staging) abort();
        memcpy(copy.staging, source, nbytes);
    }
    return enqueue(stream, copy, wait || (!copy.pinned && !copy.staging));
}

/* Rule: to memory that is not registered, the copy is complete when the call returns. */
static CUresult copy_out(void *target, CUdeviceptr source, size_t nbytes, CUstream stream,
                         bool wait)
{
    CUresult refused = check_device_side(source);
    enum host_kind kind = host_kind((uint64_t)target, nbytes);
    if (refused || kind == HOST_MIXED) return CUDA_ERROR_INVALID_VALUE;
    struct operation copy = {.kind = COPY_OUT, .target = (uint64_t)target, .source = source,
                             .nbytes = nbytes, .pinned = kind != HOST_PAGEABLE};
    return enqueue(stream, copy, wait || !copy.pinned);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t nbytes,
                                     CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return nbytes ? copy_in(target, source, nbytes, stream, false) : CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t nbytes)
{
    ENTER(NEEDS_CONTEXT);
    return nbytes ? copy_in(target, source, nbytes, NULL, true) : CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t nbytes,
                                     CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return nbytes ? copy_out(target, source, nbytes, stream, false) : CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t nbytes)
{
    ENTER(NEEDS_CONTEXT);
    return nbytes ? copy_out(target, source, nbytes, NULL, true) : CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t nbytes,
                                     CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    if (!nbytes) return CUDA_SUCCESS;
    if (check_device_side(target) || check_device_side(source)) return CUDA_ERROR_INVALID_VALUE;
    struct operation copy = {.kind = COPY_WITHIN, .target = target, .source = source,
                             .nbytes = nbytes};
    return enqueue(stream, copy, false);
}

static CUresult fill_with(CUdeviceptr target, uint64_t value, size_t count, CUstream stream,
                          bool wait)
{
    if (!count) return CUDA_SUCCESS;
    if (check_device_side(target)) return CUDA_ERROR_INVALID_VALUE;
    struct operation operation = {.kind = FILL, .target = target, .value = value, .nbytes = count};
    return enqueue(stream, operation, wait);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count,
                                CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    return fill_with(target, value, count, stream, false);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t count)
{
    ENTER(NEEDS_CONTEXT);
    return fill_with(target, value, count, NULL, true);
}

/* ---- flags in memory ---- */

static CUresult word(const struct operation *operation, uint64_t *value, bool store)
{
    return is_device_address(operation->target) ? device_word(operation->target, value, store)
                                                : host_word(operation->target, value, store);
}

/* Write a flag, or read one until it has the wanted value. It polls, as the device does: no event
 * announces a store by another process. */
CUresult perform_value(struct operation *operation)
{
    if (operation->kind == WRITE_VALUE) return word(operation, &operation->value, true);
    for (long naps = 20; !waiting_is_over(); naps += naps < 500 ? 20 : 0) {
        uint64_t found;
        CUresult fault = word(operation, &found, false);
        if (fault) return fault;
        if ((int64_t)(found - operation->value) >= 0) break;
        nap_us(naps);
    }
    return CUDA_SUCCESS;
}

/* Rule: flags are aligned, and in device memory or in registered host memory. */
static CUresult enqueue_value(CUstream stream, enum kind kind, CUdeviceptr address, uint64_t value)
{
    bool usable = is_device_address(address) ? is_mapped(address, sizeof value)
                                             : host_kind(address, sizeof value) >= HOST_PINNED;
    if (host_kind(address, sizeof value) == HOST_MIXED) usable = false;
    if (!usable || address % sizeof value) return CUDA_ERROR_INVALID_VALUE;
    struct operation operation = {.kind = kind, .target = address, .value = value};
    return enqueue(stream, operation, false);
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value,
                                       unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED; /* no test needs it */
    return enqueue_value(stream, WAIT_VALUE, address, value);
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value,
                                        unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (flags) return CUDA_ERROR_NOT_SUPPORTED; /* no test needs it */
    return enqueue_value(stream, WRITE_VALUE, address, value);
}

