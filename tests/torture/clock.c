/* Moves the wall clock of one process by the seconds in a file that another process changes (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("TORTURE_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) offset = mapped;
  close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
  if (!real) begin();
  int result = real(id, now);
  if (!result && offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  if (at) *at = exact.tv_sec;
  return exact.tv_sec;
}
