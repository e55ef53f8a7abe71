/* Captures of streams into graphs, and the calls that spoil them. A graph here has no nodes: work
 * on a capturing stream is dropped, and nothing can be launched. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fakecuda.h"

struct capture {
    struct capture *next;
    CUstream stream;
    int mode;
    long thread;      /* the one that began it */
    bool blocking;    /* the legacy default stream waits for this stream */
    bool invalidated;
};

struct graph {
    int nothing;
};

static pthread_mutex_t capturing = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static __thread int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* The calls that no capture forbids: they put work on streams, or return known values. A driver may
 * allow more; all other calls spoil a capture. */
static const char *const safe[] = {
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName",
    "cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2", "cuEventRecord", "cuGraphDestroy", "cuLaunchHostFunc",
    "cuMemGetAllocationGranularity", "cuMemcpyDtoDAsync_v2", "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2", "cuMemsetD8Async", "cuStreamBeginCapture_v2", "cuStreamEndCapture",
    "cuStreamGetId", "cuStreamIsCapturing", "cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2",
    "cuThreadExchangeStreamCaptureMode",
};

static bool is_safe(const char *function)
{
    for (size_t i = 0; i < sizeof safe / sizeof *safe; i++)
        if (!strcmp(function, safe[i])) return true;
    return false;
}

static long this_thread(void)
{
    return syscall(SYS_gettid);
}

static struct capture *find_capture(CUstream stream)
{
    struct capture *each = captures;
    while (each && each->stream != stream) each = each->next;
    return each;
}

static bool is_legacy(CUstream stream)
{
    return (uintptr_t)stream <= CU_STREAM_LEGACY;
}

/* Rule: a thread in global mode may make no unsafe call while any capture in global mode is under
 * way. A thread that is not in relaxed mode may make none while a capture of its own is, unless
 * that capture is relaxed. */
static bool forbids(struct capture *capture)
{
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (capture->thread == this_thread()) return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
           capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

static void invalidate(struct capture *capture, const char *function)
{
    if (!capture->invalidated) trace(function, "spoils a capture");
    capture->invalidated = true;
}

/* Rule: an unsafe call that a capture forbids fails, and spoils the capture. */
CUresult captures_check(const char *function)
{
    if (!__atomic_load_n(&captures, __ATOMIC_ACQUIRE) || is_safe(function)) return CUDA_SUCCESS;
    CUresult refused = CUDA_SUCCESS;
    pthread_mutex_lock(&capturing);
    for (struct capture *each = captures; each; each = each->next)
        if (forbids(each)) {
            invalidate(each, function);
            refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    pthread_mutex_unlock(&capturing);
    return refused;
}

/* Rule: to query or to wait for a capturing stream, or for the whole context, fails in every mode,
 * and spoils the capture. `stream` NULL and `all`: the context. The legacy default stream would
 * wait for every blocking stream, so it counts as one of them. */
CUresult captures_ask(const char *function, CUstream stream, bool all)
{
    if (!__atomic_load_n(&captures, __ATOMIC_ACQUIRE)) return CUDA_SUCCESS;
    CUresult refused = CUDA_SUCCESS;
    pthread_mutex_lock(&capturing);
    for (struct capture *each = captures; each; each = each->next) {
        bool implied = !all && is_legacy(stream) && each->blocking;
        if (!all && !implied && each->stream != stream) continue;
        invalidate(each, function);
        refused = implied ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                          : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&capturing);
    return refused;
}

/* A query of an event that a capturing stream has recorded. */
CUresult captures_event(const char *function)
{
    pthread_mutex_lock(&capturing);
    for (struct capture *each = captures; each; each = each->next) invalidate(each, function);
    pthread_mutex_unlock(&capturing);
    return CUDA_ERROR_CAPTURED_EVENT;
}

/* Whether work put on the stream now goes into a graph. */
CUresult captures_put(const char *function, CUstream stream, bool wait, bool *captured)
{
    *captured = false;
    if (!__atomic_load_n(&captures, __ATOMIC_ACQUIRE)) return CUDA_SUCCESS;
    if (wait || is_legacy(stream)) return captures_ask(function, stream, false);
    pthread_mutex_lock(&capturing);
    struct capture *capture = find_capture(stream);
    *captured = capture != NULL;
    bool invalidated = capture && capture->invalidated;
    pthread_mutex_unlock(&capturing);
    return invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

/* ---- calls ---- */

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER(NEEDS_INIT);
    if (!mode || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    ENTER(NEEDS_CONTEXT);
    unsigned flags = 0;
    if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (is_legacy(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult refused = stream_flags(stream, &flags);
    if (refused) return refused;
    struct capture *made = calloc(1, sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (struct capture){.stream = stream,
                             .mode = mode,
                             .thread = this_thread(),
                             .blocking = !(flags & CU_STREAM_NON_BLOCKING)};
    pthread_mutex_lock(&capturing);
    bool again = find_capture(stream) != NULL;
    if (!again) {
        made->next = captures;
        __atomic_store_n(&captures, made, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&capturing);
    if (again) free(made);
    return again ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

/* Rule: a capture ends in the thread where it began, unless it is relaxed; a spoilt one gives no
 * graph. */
EXPORT CUresult cuStreamEndCapture(CUstream stream, struct graph **graph)
{
    ENTER(NEEDS_CONTEXT);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    pthread_mutex_lock(&capturing);
    struct capture **link = &captures;
    while (*link && (*link)->stream != stream) link = &(*link)->next;
    struct capture *found = *link;
    bool wrong = found && found->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
                 found->thread != this_thread();
    bool invalidated = found && found->invalidated;
    if (found && !wrong) __atomic_store_n(link, found->next, __ATOMIC_RELEASE);
    else if (wrong) invalidate(found, __func__);
    pthread_mutex_unlock(&capturing);
    if (!found) return CUDA_ERROR_ILLEGAL_STATE;
    if (wrong) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    free(found);
    if (invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = calloc(1, sizeof **graph);
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Rule: the state of the legacy default stream is unknown while a blocking stream captures; the
 * query spoils nothing. */
EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    ENTER(NEEDS_CONTEXT);
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = stream_flags(stream, NULL);
    pthread_mutex_lock(&capturing);
    struct capture *capture = find_capture(stream);
    *status = !capture ? 0 : capture->invalidated ? 2 : 1;
    for (struct capture *each = captures; each && is_legacy(stream); each = each->next)
        if (each->blocking) result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_unlock(&capturing);
    return result;
}

EXPORT CUresult cuGraphDestroy(struct graph *graph)
{
    ENTER(NEEDS_INIT);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    free(graph);
    return CUDA_SUCCESS;
}
