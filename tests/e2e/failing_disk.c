/* LD_PRELOAD: once the file $FAILING_DISK/errno exists, each file operation below that folder fails with its number. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int fails(const char *path) {
  const char *disk = getenv("FAILING_DISK");
  char name[4096];
  if (!disk || !path || strncmp(path, disk, strlen(disk))) return 0;
  snprintf(name, sizeof name, "%s/errno", disk);
  int flag = REAL(open)(name, O_RDONLY);
  if (flag < 0) return 0;
  char number[8] = "";
  ssize_t size = read(flag, number, sizeof number - 1);
  close(flag);
  errno = atoi(number);
  return size > 0;
}

static int fails_fd(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(path);
}

#define OPEN(name)                                                                                                     \
  int name(const char *path, int flags, ...) {                                                                         \
    va_list rest;                                                                                                      \
    va_start(rest, flags);                                                                                             \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                            \
    va_end(rest);                                                                                                      \
    return flags & (O_WRONLY | O_RDWR | O_CREAT) && fails(path) ? -1 : REAL(name)(path, flags, mode);                  \
  }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) { return fails_fd(fd) ? -1 : REAL(write)(fd, data, size); }
int fsync(int fd) { return fails_fd(fd) ? -1 : REAL(fsync)(fd); }
int rename(const char *from, const char *to) { return fails(to) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return fails(path) ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }
