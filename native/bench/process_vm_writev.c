// How fast the kernel copies pages into another process: process_vm_writev with 64 pages a call.

#define _GNU_SOURCE
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/page_run.h"

enum { kPagesPerCall = 64 };

// Writes the pages [start, stop) of the order.
static void WritePages(const PageRun* run, char* source, char* target, pid_t process, size_t start, size_t stop) {
  struct iovec from[kPagesPerCall];
  struct iovec to[kPagesPerCall];
  for (size_t i = start; i < stop; ++i) {
    from[i - start] = (struct iovec){.iov_base = source + PageOffset(run, i), .iov_len = run->page_bytes};
    to[i - start] = (struct iovec){.iov_base = target + PageOffset(run, i), .iov_len = run->page_bytes};
  }
  const size_t num_pages = stop - start;
  const ssize_t num_written = process_vm_writev(process, from, num_pages, to, num_pages, 0);
  if (num_written < 0) Fail("process_vm_writev");
  if ((size_t)num_written != num_pages * run->page_bytes) {
    fprintf(stderr, "process_vm_writev wrote %zd of %zu bytes\n", num_written, num_pages * run->page_bytes);
    exit(1);
  }
}

static int64_t Write(const PageRun* run, char* source, char* target, pid_t process) {
  const int64_t start_ns = MonotonicNs();
  for (size_t round = 0; round < run->num_rounds; ++round) {
    for (size_t start = 0; start < run->num_pages; start += kPagesPerCall) {
      const size_t stop = start + kPagesPerCall < run->num_pages ? start + kPagesPerCall : run->num_pages;
      WritePages(run, source, target, process, start, stop);
    }
  }
  return MonotonicNs() - start_ns;
}

// Makes every page of the target present in this process, says so, and stays until the writer closes `done`.
static void HoldTarget(const PageRun* run, char* target, int ready, int done) {
  memset(target, 0, RegionBytes(run));
  char token = 1;
  if (write(ready, &token, 1) != 1) Fail("write");
  while (read(done, &token, 1) > 0) continue;
}

int main(int argc, char** argv) {
  const PageRun run = ParsePageRun(argc, argv);
  char* source = MapRegion(&run, 1);
  char* target = MapRegion(&run, 0);

  int ready[2];
  int done[2];
  if (pipe(ready) != 0 || pipe(done) != 0) Fail("pipe");
  const pid_t holder = fork();
  if (holder < 0) Fail("fork");
  if (holder == 0) {
    close(done[1]);
    HoldTarget(&run, target, ready[1], done[0]);
    return 0;
  }
  close(ready[1]);
  close(done[0]);
  char token;
  if (read(ready[0], &token, 1) != 1) Fail("the target process is gone");
  const int64_t elapsed_ns = Write(&run, source, target, holder);
  close(done[1]);
  waitpid(holder, NULL, 0);
  PrintResult(&run, "process_vm_writev", elapsed_ns);
  return 0;
}
