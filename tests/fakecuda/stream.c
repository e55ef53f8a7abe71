/* Streams and events: one thread for each stream, which runs its operations in order. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fakecuda.h"

struct stream {
    struct stream *next;
    pthread_cond_t wake;
    struct operation *head, *tail;
    uint64_t enqueued, finished; /* operations, ever */
    int device;
    unsigned flags;
    uint64_t id;    /* no other stream of the process has it */
    struct timespec held_up; /* the end of its last wait */
    bool closing;   /* ends when its operations are done */
    bool abandoned; /* its context is gone: the remaining operations are dropped */
    int users;      /* its thread, and the threads that wait for it */
};

struct event {
    struct event *next;
    uint64_t recorded, done; /* tickets: of the last record requested, and of the last one run */
    int device;
    bool captured; /* recorded last by a stream that captures */
    int users; /* the caller's handle, and the operations that name it */
};

/* One lock for all, and one condition that signals the end of everything: there are few waits, and
 * none may miss its signal. */
static pthread_mutex_t work = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static struct stream *streams;
static struct event *events;
static struct stream *default_streams[MAX_DEVICES][2]; /* the legacy one, the per-thread one */
static uint64_t last_id;
/* The handles of destroyed streams, until another stream gets the same handle. */
static CUstream destroyed[1024];
static size_t destroyed_count;
static __thread struct stream *own; /* on a stream's thread */

void streams_wake(void)
{
    pthread_mutex_lock(&work);
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&work);
}

/* Whether a waiting operation must give up: the process is spoilt, or the stream is gone. */
bool waiting_is_over(void)
{
    return sticky_error() || __atomic_load_n(&own->abandoned, __ATOMIC_ACQUIRE);
}

/* ---- events ---- */

static struct event *find_event(CUevent handle)
{
    struct event *each = events;
    while (each && each != handle) each = each->next;
    return each;
}

static void let_go_of_event(struct event *event)
{
    if (!--event->users) free(event);
}

static void remove_event(struct event *event)
{
    struct event **link = &events;
    while (*link != event) link = &(*link)->next;
    *link = event->next;
    let_go_of_event(event);
}

static void perform_record(struct operation *operation)
{
    pthread_mutex_lock(&work);
    if (operation->event->done < operation->ticket) operation->event->done = operation->ticket;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&work);
}

/* ---- the thread of a stream ---- */

static void perform_call(struct operation *operation)
{
    in_host_function = true;
    operation->function(operation->argument);
    in_host_function = false;
}

/* Run one operation, without a lock. Rule: after a fault nothing runs any more, including host
 * functions. A failure that a test injected into the operation comes first. */
static CUresult perform(struct operation *operation)
{
    const char *held = operation->plan.held;
    if (held) trace(held, "held");
    while (held && still_held(held) && !waiting_is_over()) nap_us(1000);
    if (waiting_is_over()) return CUDA_SUCCESS;
    if (operation->plan.later) return operation->plan.later;
    switch (operation->kind) {
    case RECORD: perform_record(operation); return CUDA_SUCCESS;
    case CALL: perform_call(operation); return CUDA_SUCCESS;
    case WRITE_VALUE:
    case WAIT_VALUE: return perform_value(operation);
    default: return perform_copy(operation);
    }
}

static void finish(struct stream *stream, struct operation *operation)
{
    stream->head = operation->next;
    if (!stream->head) stream->tail = NULL;
    stream->finished++;
    if (operation->event) let_go_of_event(operation->event);
    free(operation->staging);
    free(operation);
    pthread_cond_broadcast(&progress);
}

static void let_go_of_stream(struct stream *stream)
{
    if (--stream->users) return;
    pthread_cond_destroy(&stream->wake);
    free(stream);
}

static bool is_earlier(struct timespec one, struct timespec other)
{
    return one.tv_sec == other.tv_sec ? one.tv_nsec < other.tv_nsec : one.tv_sec < other.tv_sec;
}

static bool may_wait(const struct operation *operation)
{
    return operation->plan.held || (operation->kind != COPY_IN && operation->kind != COPY_OUT &&
                                    operation->kind != RECORD);
}

static void *run(void *argument)
{
    struct stream *stream = own = argument;
    pthread_mutex_lock(&work);
    for (;;) {
        while (!stream->head && !stream->closing) pthread_cond_wait(&stream->wake, &work);
        struct operation *operation = stream->head;
        if (!operation) break;
        pthread_mutex_unlock(&work);
        if (is_earlier(operation->queued, stream->held_up)) operation->queued = stream->held_up;
        CUresult failed = perform(operation);
        if (may_wait(operation)) clock_gettime(CLOCK_MONOTONIC, &stream->held_up);
        if (failed) spoil(failed);
        pthread_mutex_lock(&work);
        finish(stream, operation);
    }
    let_go_of_stream(stream);
    pthread_mutex_unlock(&work);
    return NULL;
}

/* Signals are the application's: its handlers must not run on a thread that it does not know. */
static bool start_thread(struct stream *stream)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = !pthread_create(&thread, NULL, run, stream);
    if (started) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

static struct stream *make_stream(int device, unsigned flags)
{
    struct stream *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    uint64_t id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    *made = (struct stream){.device = device, .flags = flags, .id = id, .users = 1};
    pthread_cond_init(&made->wake, NULL);
    if (start_thread(made)) return made;
    let_go_of_stream(made);
    return NULL;
}

/* ---- finding, queueing, waiting ---- */

static struct stream *default_stream(int which)
{
    struct stream **place = &default_streams[current_device()][which];
    if (!*place) *place = make_stream(current_device(), 0);
    return *place;
}

/* Rule: to name a destroyed stream is undefined. Here it ends the process. */
static void check_destroyed(CUstream handle)
{
    for (size_t i = 0; i < destroyed_count; i++)
        if (destroyed[i] == handle) {
            account_complain("a stream was named that had been destroyed");
            abort();
        }
}

static struct stream *find_stream(CUstream handle)
{
    if ((uintptr_t)handle <= CU_STREAM_LEGACY) return default_stream(0);
    if ((uintptr_t)handle == CU_STREAM_PER_THREAD) return default_stream(1);
    struct stream *each = streams;
    while (each && each != handle) each = each->next;
    if (!each) check_destroyed(handle);
    return each;
}

/* Wait, asleep, until the stream has finished `count` operations. */
static void wait_for(struct stream *stream, uint64_t count)
{
    stream->users++;
    while (stream->finished < count && !sticky_error()) pthread_cond_wait(&progress, &work);
    let_go_of_stream(stream);
}

static CUresult take_event(struct operation *operation, struct stream *stream)
{
    struct event *event = find_event(operation->event);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    /* Rule: an event is recorded in streams of its own context. */
    if (event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
    event->users++;
    event->captured = false;
    operation->ticket = ++event->recorded;
    return CUDA_SUCCESS;
}

static CUresult enqueue_locked(CUstream handle, struct operation *operation, bool wait)
{
    struct stream *stream = find_stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    CUresult refused = operation->event ? take_event(operation, stream) : CUDA_SUCCESS;
    if (refused) return refused;
    if (stream->tail) stream->tail->next = operation;
    else stream->head = operation;
    stream->tail = operation;
    stream->enqueued++;
    pthread_cond_signal(&stream->wake);
    if (wait) wait_for(stream, stream->enqueued);
    return CUDA_SUCCESS;
}

/* Work of a capturing stream is never done, and an event that it records never comes. */
static CUresult leave_out(struct operation *operation)
{
    pthread_mutex_lock(&work);
    struct event *event = operation->event ? find_event(operation->event) : NULL;
    CUresult refused = operation->event && !event ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
    if (event) event->captured = true;
    pthread_mutex_unlock(&work);
    take_plan();
    free(operation->staging);
    return refused;
}

/* Put an operation on a stream, with the failure that a test injected into the call. `wait`: until
 * it has run. Owns `operation.staging` from now on. Needs a current context. */
CUresult enqueue(CUstream handle, struct operation operation, bool wait)
{
    bool captured;
    CUresult refused = captures_put("enqueue", handle, wait, &captured);
    if (refused) free(operation.staging);
    if (refused) return refused;
    if (captured) return leave_out(&operation);
    struct operation *kept = malloc(sizeof *kept);
    if (!kept) abort();
    *kept = operation;
    kept->plan = take_plan();
    clock_gettime(CLOCK_MONOTONIC, &kept->queued);
    pthread_mutex_lock(&work);
    refused = enqueue_locked(handle, kept, wait);
    pthread_mutex_unlock(&work);
    if (refused) {
        free(kept->staging);
        free(kept);
        return refused;
    }
    return wait ? sticky_error() : CUDA_SUCCESS;
}

/* Wait for everything on a device's streams. */
CUresult streams_drain(int device)
{
    pthread_mutex_lock(&work);
    for (int which = 0; which < 2; which++)
        if (default_streams[device][which])
            wait_for(default_streams[device][which], default_streams[device][which]->enqueued);
    /* From the start after each wait: the list may have changed meanwhile. */
    for (struct stream *each = streams; each && !sticky_error();) {
        bool busy = each->device == device && each->finished < each->enqueued;
        if (busy) wait_for(each, each->enqueued);
        each = busy ? streams : each->next;
    }
    pthread_mutex_unlock(&work);
    return sticky_error();
}

static void close_stream(struct stream *stream, bool abandoned)
{
    __atomic_store_n(&stream->abandoned, abandoned, __ATOMIC_RELEASE);
    stream->closing = true;
    pthread_cond_signal(&stream->wake);
}

/* Destroy a context's streams, even with work on them, and its events. */
void streams_abandon(int device)
{
    pthread_mutex_lock(&work);
    for (struct stream **link = &streams; *link;) {
        struct stream *each = *link;
        if (each->device == device) {
            *link = each->next;
            close_stream(each, true);
        } else link = &each->next;
    }
    for (int which = 0; which < 2; which++) {
        if (default_streams[device][which]) close_stream(default_streams[device][which], true);
        default_streams[device][which] = NULL;
    }
    for (struct event *each = events, *next; each; each = next) {
        next = each->next;
        if (each->device == device) remove_event(each);
    }
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&work);
}

/* ---- streams: calls ---- */

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (!stream || flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    struct stream *made = make_stream(current_device(), flags);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&work);
    made->next = streams;
    streams = made;
    for (size_t i = 0; i < destroyed_count; i++)
        if (destroyed[i] == made) destroyed[i] = destroyed[--destroyed_count];
    pthread_mutex_unlock(&work);
    *stream = made;
    return CUDA_SUCCESS;
}

/* Rule: destroying returns at once, and the work on the stream still runs. */
EXPORT CUresult cuStreamDestroy_v2(CUstream handle)
{
    ENTER(NEEDS_CONTEXT);
    CUresult refused = captures_ask(__func__, handle, false);
    if (refused) return refused;
    pthread_mutex_lock(&work);
    struct stream **link = &streams;
    while (*link && *link != handle) link = &(*link)->next;
    struct stream *found = *link;
    if (found) {
        *link = found->next;
        close_stream(found, false);
        if (destroyed_count < sizeof destroyed / sizeof *destroyed)
            destroyed[destroyed_count++] = handle;
    } else check_destroyed(handle);
    pthread_mutex_unlock(&work);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle)
{
    ENTER(NEEDS_CONTEXT);
    CUresult refused = captures_ask(__func__, handle, false);
    if (refused) return refused;
    pthread_mutex_lock(&work);
    struct stream *stream = find_stream(handle);
    if (stream) wait_for(stream, stream->enqueued);
    pthread_mutex_unlock(&work);
    return stream ? sticky_error() : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuStreamQuery(CUstream handle)
{
    ENTER(NEEDS_CONTEXT);
    CUresult refused = captures_ask(__func__, handle, false);
    if (refused) return refused;
    pthread_mutex_lock(&work);
    struct stream *stream = find_stream(handle);
    bool busy = stream && stream->finished < stream->enqueued;
    pthread_mutex_unlock(&work);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

/* Whether the stream exists; its flags unless `flags` is NULL. */
CUresult stream_flags(CUstream handle, unsigned *flags)
{
    pthread_mutex_lock(&work);
    struct stream *stream = find_stream(handle);
    if (stream && flags) *flags = stream->flags;
    pthread_mutex_unlock(&work);
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuStreamGetId(CUstream handle, uint64_t *id)
{
    ENTER(NEEDS_CONTEXT);
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&work);
    struct stream *stream = find_stream(handle);
    if (stream) *id = stream->id;
    pthread_mutex_unlock(&work);
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Rule: the function runs on a thread of the driver's, may not call CUDA, and is skipped after a
 * fault. */
EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument)
{
    ENTER(NEEDS_CONTEXT);
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    struct operation call = {.kind = CALL, .function = function, .argument = argument};
    return enqueue(handle, call, false);
}

/* ---- events: calls ---- */

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
    if (!event || flags & ~known) return CUDA_ERROR_INVALID_VALUE;
    struct event *made = calloc(1, sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (struct event){.device = current_device(), .users = 1};
    pthread_mutex_lock(&work);
    made->next = events;
    events = made;
    pthread_mutex_unlock(&work);
    *event = made;
    return CUDA_SUCCESS;
}

/* Rule: destroying returns at once; a pending record or wait still ends. */
EXPORT CUresult cuEventDestroy_v2(CUevent handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&work);
    struct event *event = find_event(handle);
    if (event) remove_event(event);
    pthread_mutex_unlock(&work);
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(NEEDS_CONTEXT);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    return enqueue(stream, (struct operation){.kind = RECORD, .event = event}, false);
}

EXPORT CUresult cuEventQuery(CUevent handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&work);
    struct event *event = find_event(handle);
    bool pending = event && event->done < event->recorded;
    bool captured = event && event->captured;
    pthread_mutex_unlock(&work);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (captured) return captures_event(__func__);
    return pending ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

EXPORT CUresult cuEventSynchronize(CUevent handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&work);
    struct event *event = find_event(handle);
    bool captured = event && event->captured;
    if (event && !captured) {
        uint64_t ticket = event->recorded;
        event->users++;
        while (event->done < ticket && !sticky_error()) pthread_cond_wait(&progress, &work);
        let_go_of_event(event);
    }
    pthread_mutex_unlock(&work);
    if (captured) return captures_event(__func__);
    return event ? sticky_error() : CUDA_ERROR_INVALID_HANDLE;
}
