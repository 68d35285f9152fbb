/* LD_PRELOAD: file operations below the folder FAILING_DISK fail, of Python, Rust and C++ alike; not on heartbeats,
   whose number is left to chance.

   Once the file FAILING_DISK/errno exists, each operation that writes fails with the number in it. Or, with
   FAILING_OPERATION="write 12 28 once", the 12th operation of this kind fails with errno 28, or with "later" instead of
   "once" each later one, too; only in rank FAILING_RANK. What has failed is appended to the file FAILING_LOG.
   Kinds: read (also opening for it), open (for writing), write (also sync, rename, mkdir, unlink). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES (O_WRONLY | O_RDWR | O_CREAT)

static int count, is_struck;

static int fails_by_file(const char *kind, const char *disk) {
  char name[4096], number[8] = "";
  snprintf(name, sizeof name, "%s/errno", disk);
  int file = !strcmp(kind, "read") ? -1 : REAL(open)(name, O_RDONLY);
  if (file < 0) return 0;
  ssize_t size = REAL(read)(file, number, sizeof number - 1);
  close(file);
  errno = atoi(number);
  return size > 0;
}

static int fails_by_count(const char *kind, const char *path, const char *operation) {
  const char *rank = getenv("RANK"), *failing = getenv("FAILING_RANK");
  char wanted[8], mode[8];
  int at, number;
  if (strcmp(rank ? rank : "0", failing ? failing : "0")) return 0;
  if (sscanf(operation, "%7s %d %d %7s", wanted, &at, &number, mode) != 4) abort();
  int is_same = !strcmp(kind, wanted);
  int both_write = strcmp(kind, "read") && strcmp(wanted, "read");
  if (is_struck && (strcmp(mode, "later") || !(is_same || both_write))) return 0;
  if (!is_struck && (!is_same || __sync_add_and_fetch(&count, 1) != at)) return 0;
  is_struck = 1;
  int log = REAL(open)(getenv("FAILING_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0644);
  char line[5000];
  REAL(write)(log, line, snprintf(line, sizeof line, "%s %s\n", kind, path));
  close(log);
  errno = number;
  return 1;
}

static int fails(const char *kind, const char *path) {
  const char *disk = getenv("FAILING_DISK"), *operation = getenv("FAILING_OPERATION");
  if (!disk || !path || strncmp(path, disk, strlen(disk)) || strstr(path, "/heartbeats")) return 0;
  return operation ? fails_by_count(kind, path, operation) : fails_by_file(kind, disk);
}

static int fails_fd(const char *kind, int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(kind, path);
}

#define OPEN(name)                                                                                                     \
  int name(const char *path, int flags, ...) {                                                                         \
    va_list rest;                                                                                                      \
    va_start(rest, flags);                                                                                             \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                          \
    va_end(rest);                                                                                                      \
    int is_folder = flags & O_DIRECTORY;                                                                               \
    return !is_folder && fails(flags & WRITES ? "open" : "read", path) ? -1 : REAL(name)(path, flags, mode);           \
  }
OPEN(open)
OPEN(open64)

ssize_t read(int fd, void *data, size_t size) { return fails_fd("read", fd) ? -1 : REAL(read)(fd, data, size); }
ssize_t write(int fd, const void *data, size_t size) {
  return fails_fd("write", fd) ? -1 : REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
  return fails_fd("write", fd) ? -1 : REAL(writev)(fd, parts, number);
}
int fsync(int fd) { return fails_fd("write", fd) ? -1 : REAL(fsync)(fd); }
int rename(const char *from, const char *to) { return fails("write", to) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return fails("write", path) ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails("write", path) ? -1 : REAL(mkdir)(path, mode); }
