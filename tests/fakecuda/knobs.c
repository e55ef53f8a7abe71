/* The environment, the trace of calls, and injected failures. README.md lists the knobs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fakecuda.h"

static struct knobs read_once;
static const char *faults_path, *trace_path;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint64_t bytes(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static bool flag(const char *name, bool otherwise)
{
    return bytes(name, otherwise) != 0;
}

static double number(const char *name, const char *otherwise)
{
    const char *text = getenv(name);
    if (!text && otherwise) text = getenv(otherwise);
    return text ? atof(text) : 0;
}

static void read_knobs(void)
{
    uint64_t devices = bytes("FAKECUDA_DEVICES", 1);
    read_once = (struct knobs){
        .devices = devices > MAX_DEVICES ? MAX_DEVICES : (int)devices,
        .total = bytes("FAKECUDA_TOTAL", (uint64_t)1 << 30),
        .context = bytes("FAKECUDA_CONTEXT", 0),
        .gbps_in = number("FAKECUDA_GBPS_IN", "FAKECUDA_GBPS"),
        .gbps_out = number("FAKECUDA_GBPS_OUT", "FAKECUDA_GBPS"),
        .version = (int)bytes("FAKECUDA_VERSION", 13000),
        .pin_max = bytes("FAKECUDA_PIN_MAX", UINT64_MAX),
        .pin_total = bytes("FAKECUDA_PIN_TOTAL", UINT64_MAX),
        .read_only_pins = flag("FAKECUDA_READ_ONLY_PINS", false),
        .unmap_one = flag("FAKECUDA_UNMAP_ONE", false),
        .map_us = number("FAKECUDA_MAP_US", NULL),
        .access_us = number("FAKECUDA_ACCESS_US", NULL),
        .unmap_us = number("FAKECUDA_UNMAP_US", NULL),
        .pin_s = number("FAKECUDA_PIN_S", NULL),
        .hollow = flag("FAKECUDA_HOLLOW", false),
    };
    faults_path = getenv("FAKECUDA_FAULTS");
    trace_path = getenv("FAKECUDA_TRACE");
}

/* The knobs as they were at the first call of this process. */
const struct knobs *knobs(void)
{
    pthread_once(&once, read_knobs);
    return &read_once;
}

/* Append "pid tid function note" to FAKECUDA_TRACE. One short write a line, so that lines of
 * several processes do not mix, in a file or a fifo. */
void trace(const char *function, const char *note)
{
    char line[160];
    knobs();
    if (!trace_path) return;
    int length = snprintf(line, sizeof line, "%d %d %s%s%s\n", (int)getpid(),
                          (int)syscall(SYS_gettid), function, *note ? " " : "", note);
    int fd = open(trace_path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return;
    if (write(fd, line, (size_t)length) != length) account_complain("the trace is full");
    close(fd);
}

/* ---- injected failures ----
 *
 * One rule a line of FAKECUDA_FAULTS:   FUNCTION CODE [after=N] [times=N] [pid=N] [async|sticky]
 * or                                    FUNCTION hold [after=N] [times=N] [pid=N]
 * Each call reads the file. Each process counts the calls that match a rule, since the last write
 * to the file. */

#define MAX_RULES 32

struct rule {
    char function[64];
    CUresult code;
    bool hold, async, sticky;
    unsigned after, times, pid;
};

static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
static unsigned seen[MAX_RULES];
static struct stat written;

/* "cuMemcpyHtoDAsync" and "cuMemcpyHtoDAsync_v2" mean the same call. */
static bool names(const char *rule, const char *function)
{
    size_t length = strlen(rule);
    if (strncmp(rule, function, length)) return false;
    return !function[length] || (function[length] == '_' && function[length + 1] == 'v');
}

static bool parse_rule(char *line, struct rule *rule)
{
    char *rest = NULL;
    char *function = strtok_r(line, " \t\r", &rest);
    char *action = function ? strtok_r(NULL, " \t\r", &rest) : NULL;
    if (!action || *function == '#') return false;
    *rule = (struct rule){.times = UINT32_MAX};
    snprintf(rule->function, sizeof rule->function, "%s", function);
    rule->hold = !strcmp(action, "hold");
    rule->code = rule->hold ? 0 : atoi(action);
    if (!rule->hold && !rule->code) account_complain("no error code: %s %s", function, action);
    for (char *word; (word = strtok_r(NULL, " \t\r", &rest));) {
        if (sscanf(word, "after=%u", &rule->after) == 1) continue;
        if (sscanf(word, "times=%u", &rule->times) == 1) continue;
        if (sscanf(word, "pid=%u", &rule->pid) == 1) continue;
        if (!strcmp(word, "async")) rule->async = true;
        else if (!strcmp(word, "sticky")) rule->sticky = true;
        else account_complain("a rule that is not understood: %s ... %s", function, word);
    }
    return true;
}

/* Read the rules; returns their number. Counts start anew when the file has been written again. */
static int read_rules(struct rule rules[MAX_RULES])
{
    char text[4096];
    struct stat status;
    int count = 0, fd = open(faults_path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    if (length < 0 || fstat(fd, &status)) length = 0;
    close(fd);
    text[length] = 0;
    if (length && (status.st_ino != written.st_ino || status.st_size != written.st_size ||
                   memcmp(&status.st_mtim, &written.st_mtim, sizeof status.st_mtim))) {
        written = status;
        memset(seen, 0, sizeof seen);
    }
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line && count < MAX_RULES;
         line = strtok_r(NULL, "\n", &rest))
        if (parse_rule(line, &rules[count])) count++;
    return count;
}

/* The effect of the rules on this call of `function`; counts the call. */
struct plan plan_for(const char *function)
{
    struct rule rules[MAX_RULES];
    struct plan plan = {0};
    knobs();
    if (!faults_path) return plan;
    pthread_mutex_lock(&counting);
    int count = read_rules(rules);
    for (int i = 0; i < count; i++) {
        struct rule *rule = &rules[i];
        if (!names(rule->function, function)) continue;
        if (rule->pid && rule->pid != (unsigned)getpid()) continue;
        unsigned nth = seen[i]++;
        if (nth < rule->after || nth - rule->after >= rule->times) continue;
        if (rule->hold) plan.held = function;
        else if (rule->async) plan.later = rule->code;
        else plan.now = rule->code;
        plan.sticky = rule->sticky;
        plan.async = rule->async;
        break;
    }
    pthread_mutex_unlock(&counting);
    return plan;
}

/* Whether a rule still holds `function` back. */
bool still_held(const char *function)
{
    struct rule rules[MAX_RULES];
    bool held = false;
    pthread_mutex_lock(&counting);
    int count = read_rules(rules);
    for (int i = 0; i < count; i++)
        if (rules[i].hold && names(rules[i].function, function)) held = true;
    pthread_mutex_unlock(&counting);
    return held;
}
