/* A disk that fills at one write, for tests: gcc -shared -fPIC full_disk.c -o full_disk.so -ldl

   With LD_PRELOAD, each call that may need space under a folder is counted: creating, writing,
   flushing, renaming. After `arm`, the n-th fails with ENOSPC, and so does each later one if the
   disk stays full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long counted, failing;
static int stays_full;
static char failed[PATH_MAX + 64];

/* Begin to count calls under a folder; n = 0 lets all of them succeed. */
void arm(const char *under, long n, int stays) {
    strncpy(folder, under, sizeof folder - 1);
    counted = 0, failing = n, stays_full = stays, failed[0] = 0;
}

long calls(void) { return counted; }
const char *first_failed(void) { return failed; }

static int is_full(const char *call, const char *path) {
    if (!folder[0] || strncmp(path, folder, strlen(folder))) return 0;
    long n = ++counted;
    if (!failing || n < failing || (n > failing && !stays_full)) return 0;
    if (!failed[0]) snprintf(failed, sizeof failed, "%s %s", call, path + strlen(folder));
    errno = ENOSPC;
    return 1;
}

static int is_full_handle(const char *call, int handle) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_full(call, path);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

#define BY_HANDLE(type, name, parameters, arguments)                                               \
    type name parameters {                                                                         \
        REAL(name);                                                                                \
        return is_full_handle(#name, handle) ? -1 : real arguments;                                \
    }

BY_HANDLE(ssize_t, write, (int handle, const void *data, size_t size), (handle, data, size))
BY_HANDLE(ssize_t, pwrite, (int handle, const void *data, size_t size, off_t at),
          (handle, data, size, at))
BY_HANDLE(ssize_t, pwrite64, (int handle, const void *data, size_t size, off64_t at),
          (handle, data, size, at))
BY_HANDLE(ssize_t, writev, (int handle, const struct iovec *parts, int n), (handle, parts, n))
BY_HANDLE(int, fsync, (int handle), (handle))
BY_HANDLE(int, fdatasync, (int handle), (handle))
BY_HANDLE(int, ftruncate, (int handle, off_t size), (handle, size))
BY_HANDLE(int, ftruncate64, (int handle, off64_t size), (handle, size))
BY_HANDLE(int, fallocate, (int handle, int mode, off_t at, off_t size), (handle, mode, at, size))
BY_HANDLE(int, fallocate64, (int handle, int mode, off64_t at, off64_t size),
          (handle, mode, at, size))

#define BY_PATH(name, parameters, arguments, path)                                                 \
    int name parameters {                                                                          \
        REAL(name);                                                                                \
        return is_full(#name, path) ? -1 : real arguments;                                         \
    }

BY_PATH(rename, (const char *from, const char *to), (from, to), to)
BY_PATH(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), to)
BY_PATH(mkdir, (const char *path, mode_t mode), (path, mode), path)
BY_PATH(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), path)

#define OPEN(name, parameters, arguments)                                                          \
    int name parameters {                                                                          \
        REAL(name);                                                                                \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                                  \
        va_end(rest);                                                                              \
        return flags & O_CREAT && access(path, F_OK) && is_full(#name, path) ? -1 : real arguments; \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
