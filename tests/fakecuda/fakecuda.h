/* Shared by the files of the fake driver. README.md lists what it emulates.
 *
 *   accounts.c  device memory as files: its holders and the free bytes, across processes
 *   knobs.c     the environment, the trace, injected failures
 *   device.c    initialisation, devices, contexts; `enter`, which every call makes first
 *   memory.c    allocations, reservations, mappings, access; reading and writing through them
 *   host.c      registered ("pinned") host memory
 *   stream.c    streams, events, and the operations that run on them
 *   capture.c   captures of streams, and the calls that spoil them
 *   copy.c      the calls that put copies, fills and flags on a stream
 *   loader.c    cuGetProcAddress
 *   nvml.c      a library of its own, libnvidia-ml.so.1, on top of accounts.c
 *
 * Locks, in the order in which they may be taken: `setup` (device.c), `space` (memory.c), the
 * accounts' file lock. `work` (stream.c) may be taken under `setup`, and nothing under it;
 * nor under `capturing` (capture.c).
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "driver.h"

#define EXPORT __attribute__((visibility("default")))
#define GRANULARITY ((size_t)2 << 20)
#define MAX_DEVICES 16
#define PIECE ((size_t)1 << 20) /* bytes copied between two looks at the mappings */

/* ---- accounts.c ---- */

#define ACCOUNT_NAME 64

/* One live file of device memory: an allocation, or the overhead of a process's context. */
enum holding_kind { MEMORY, CONTEXT, MPS_CLIENT };

struct holding {
    pid_t pid; /* its maker; others may hold the memory since */
    enum holding_kind kind;
    uint64_t nbytes;
};

const char *account_folder(void);
int account_create(int gpu, bool context, uint64_t nbytes, uint64_t total, char *name);
void account_settle(int gpu, const char *name);
uint64_t account_used(int gpu);
int account_list(int gpu, struct holding *list, int room);
int account_of(int fd, char *name);
int account_engine(int gpu, bool in);
void account_uuid(int gpu, unsigned char uuid[16]);
void account_uuid_text(int gpu, char text[41]);
void account_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- knobs.c ---- */

struct knobs {
    int devices;
    uint64_t total;         /* bytes of each device */
    uint64_t context;       /* bytes that a process's context takes on the device */
    double gbps_in, gbps_out; /* 1e9 bytes a second of a copy engine; 0: no limit */
    int version;            /* 13000 is CUDA 13.0 */
    uint64_t pin_max;       /* largest single registration, bytes */
    uint64_t pin_total;     /* of all registrations of one process, bytes */
    bool read_only_pins;    /* memory that is mapped read-only can be registered */
    bool unmap_one;         /* cuMemUnmap takes one mapping a call */
    double map_us, access_us, unmap_us; /* cost of a call for each mapping, microseconds */
    double pin_s;           /* cost of registering, seconds a GiB; copies wait meanwhile */
    bool hollow;            /* copies and fills take their time, and move nothing */
};

const struct knobs *knobs(void);

/* The effect of an injected failure on the call that just entered. */
struct plan {
    CUresult now;      /* return this */
    bool sticky;       /* ... and spoil the process as well */
    CUresult later;    /* or: the operation spoils it when it executes */
    const char *held;  /* or: wait until the rule for this function is gone */
    bool async;        /* ... when the operation executes, not in the call */
};

struct plan plan_for(const char *function);
bool still_held(const char *function);
void trace(const char *function, const char *note);

/* ---- device.c ---- */

struct context {
    int device;
    int retained;      /* 0: destroyed, or never made */
    int holding;       /* descriptor of the context's overhead */
    char name[ACCOUNT_NAME];
};

enum needs {
    NEEDS_INIT,        /* cuInit was called, in this very process */
    NEEDS_HEALTH,      /* ... and no sticky error */
    NEEDS_CONTEXT,     /* ... and a context is current on this thread */
};

/* Every exported call starts with this: the checks, and the failures that a test injects. */
#define ENTER(needs)                                      \
    do {                                                  \
        CUresult refused_ = enter(__func__, needs);       \
        if (refused_) return refused_;                    \
    } while (0)

CUresult enter(const char *function, enum needs needs);
struct plan take_plan(void);
CUresult sticky_error(void);
void spoil(CUresult error);
void nap_us(long microseconds);
void spend_us(double microseconds);
int current_device(void);
CUcontext current_context(void);
int device_count(void);
int gpu_of(int device);
int device_of(int gpu);
extern __thread bool in_host_function;

/* ---- memory.c ---- */

bool is_device_address(uint64_t address);
bool is_mapped(uint64_t address, size_t nbytes);
int device_of_address(uint64_t address);
CUresult device_transfer(uint64_t address, char *host, size_t nbytes, bool in);
CUresult device_word(uint64_t address, uint64_t *value, bool store);

/* ---- host.c ---- */

enum host_kind {
    HOST_PAGEABLE,  /* no byte of it is registered */
    HOST_PINNED,    /* every byte is, and may be written by the device */
    HOST_READ_ONLY, /* every byte is, some of them for reading only */
    HOST_MIXED,     /* part of it is: copies refuse that */
};

enum host_kind host_kind(uint64_t address, size_t nbytes);
CUresult host_word(uint64_t address, uint64_t *value, bool store);
void load_or_store(uint64_t *address, uint64_t *value, bool store);

/* ---- stream.c ---- */

enum kind { COPY_IN, COPY_OUT, COPY_WITHIN, FILL, WRITE_VALUE, WAIT_VALUE, RECORD, CALL };

struct operation {
    struct operation *next;
    enum kind kind;
    uint64_t target;        /* address */
    uint64_t source;        /* address */
    size_t nbytes;
    void *staging;          /* own copy of the source, to be freed */
    struct timespec queued; /* when it could run, if its copy engine were free */
    bool pinned;            /* the host side was registered when this was enqueued */
    uint64_t value;         /* of a fill or a flag */
    struct event *event;
    uint64_t ticket;        /* which recording of `event` */
    CUhostFn function;
    void *argument;
    struct plan plan;
};

CUresult enqueue(CUstream stream, struct operation operation, bool wait);
void streams_abandon(int device);
CUresult streams_drain(int device);
void streams_wake(void);
bool waiting_is_over(void);
CUresult stream_flags(CUstream stream, unsigned *flags);

/* ---- capture.c ---- */

CUresult captures_check(const char *function);
CUresult captures_ask(const char *function, CUstream stream, bool all);
CUresult captures_event(const char *function);
CUresult captures_put(const char *function, CUstream stream, bool wait, bool *captured);

/* ---- copy.c ---- */

CUresult perform_copy(struct operation *operation);
CUresult perform_value(struct operation *operation);

#endif
