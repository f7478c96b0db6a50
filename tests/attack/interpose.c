/* A machine that misbehaves, for the processes that load this library before all others (LD_PRELOAD).

   ATTACK_CLOCK=FILE   wall clocks are FILE's number of seconds ahead; FILE.R, where it is there, is rank R's own
   ATTACK_DISK=OP:ERRNO:PART:AFTER:TIMES
                       calls of OP (open, write, fsync, rename, mkdir) on paths that hold PART fail with ERRNO, TIMES times, once
                       AFTER of them have gone well; rename with ERRNO 0 returns, and takes place half a second later         */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int (*real_clock)(clockid_t, struct timespec *);

static long ahead(void) {
    static long offset, looked = -1;
    const char *file = getenv("ATTACK_CLOCK"), *rank = getenv("RANK");
    struct timespec now;
    char path[4096], text[32] = "";
    if (!file) return 0;
    real_clock(CLOCK_MONOTONIC, &now);
    long tick = now.tv_sec * 100 + now.tv_nsec / 10000000;
    if (tick == looked) return offset;
    looked = tick;
    snprintf(path, sizeof path, "%s.%s", file, rank ? rank : "");
    int descriptor = REAL(open)(path, O_RDONLY);
    if (descriptor < 0) descriptor = REAL(open)(file, O_RDONLY);
    if (descriptor < 0) return offset;
    if (read(descriptor, text, sizeof text - 1) > 0) offset = atol(text);
    close(descriptor);
    return offset;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock) real_clock = REAL(clock_gettime);
    int result = real_clock(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

/* Returns -1 where the call goes on, else the error number. */
static int fault(const char *operation, const char *path) {
    static int seen;
    char wanted[16] = "", part[1024] = "";
    int number = 0, after = 0, times = 0;
    const char *order = getenv("ATTACK_DISK");
    if (!order || !path) return -1;
    if (sscanf(order, "%15[^:]:%d:%1023[^:]:%d:%d", wanted, &number, part, &after, &times) != 5) return -1;
    if (strcmp(wanted, operation) || !strstr(path, part)) return -1;
    int count = __sync_fetch_and_add(&seen, 1);
    return count >= after && count < after + times ? number : -1;
}

static int fault_at(const char *operation, int descriptor) {
    char link[64], path[4096];
    if (!getenv("ATTACK_DISK")) return -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return -1;
    path[length] = 0;
    return fault(operation, path);
}

#define FAIL(number) do { int found = (number); if (found > 0) { errno = found; return -1; } } while (0)

ssize_t write(int descriptor, const void *bytes, size_t count) {
    FAIL(fault_at("write", descriptor));
    return REAL(write)(descriptor, bytes, count);
}

int fsync(int descriptor) {
    FAIL(fault_at("fsync", descriptor));
    return REAL(fsync)(descriptor);
}

int mkdir(const char *path, mode_t mode) {
    FAIL(fault("mkdir", path));
    return REAL(mkdir)(path, mode);
}

#define OPEN(name)                                                            \
    int name(const char *path, int flags, ...) {                              \
        va_list more;                                                         \
        va_start(more, flags);                                                \
        mode_t mode = va_arg(more, mode_t);                                   \
        va_end(more);                                                         \
        FAIL(fault("open", path));                                            \
        return REAL(name)(path, flags, mode);                                 \
    }
OPEN(open)
OPEN(open64)

struct move { char from[4096], to[4096]; };

static void *later(void *argument) {
    struct move *move = argument;
    usleep(500000);
    REAL(rename)(move->from, move->to);
    free(move);
    return NULL;
}

int rename(const char *from, const char *to) {
    int number = fault("rename", to);
    FAIL(number);
    if (number < 0) return REAL(rename)(from, to);
    struct move *move = malloc(sizeof *move);
    pthread_t thread;
    snprintf(move->from, sizeof move->from, "%s", from);
    snprintf(move->to, sizeof move->to, "%s", to);
    pthread_create(&thread, NULL, later, move);
    return pthread_detach(thread);
}
