// What the measured limits share: the arguments, the region, the order of pages, the clock and the line printed.
//
// A run moves every page of a source region once a round, in one fixed random order, into the same place of a target
// region of another process. The time is from before the first page to after the last one has arrived.

#ifndef PDSERVE_BENCH_PAGE_RUN_H_
#define PDSERVE_BENCH_PAGE_RUN_H_

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct {
  size_t page_bytes;
  size_t num_pages;
  size_t num_rounds;
  uint32_t* order;
} PageRun;

static inline void Fail(const char* what) {
  perror(what);
  exit(1);
}

static inline int64_t MonotonicNs(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline size_t PositiveArgument(const char* text) {
  char* end;
  const unsigned long long value = strtoull(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value == 0 || value > (1ULL << 40)) {
    fprintf(stderr, "not a positive number: %s\n", text);
    exit(2);
  }
  return (size_t)value;
}

// Fisher-Yates with xorshift64: the same order in every run.
static inline uint32_t* ShuffledPages(size_t num_pages) {
  uint32_t* order = malloc(num_pages * sizeof(uint32_t));
  if (order == NULL) Fail("malloc");
  for (size_t i = 0; i < num_pages; ++i) order[i] = (uint32_t)i;
  uint64_t state = 0x9E3779B97F4A7C15ULL;
  for (size_t i = num_pages - 1; i > 0; --i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const size_t j = state % (i + 1);
    const uint32_t swapped = order[i];
    order[i] = order[j];
    order[j] = swapped;
  }
  return order;
}

static inline PageRun ParsePageRun(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s PAGE_BYTES REGION_BYTES ROUNDS\n", argv[0]);
    exit(2);
  }
  PageRun run = {.page_bytes = PositiveArgument(argv[1]), .num_rounds = PositiveArgument(argv[3])};
  run.num_pages = PositiveArgument(argv[2]) / run.page_bytes;
  if (run.num_pages == 0) {
    fprintf(stderr, "the region is smaller than a page\n");
    exit(2);
  }
  run.order = ShuffledPages(run.num_pages);
  return run;
}

static inline size_t RegionBytes(const PageRun* run) { return run->num_pages * run->page_bytes; }

static inline size_t PageOffset(const PageRun* run, size_t i) { return run->order[i] * run->page_bytes; }

// Shared memory, as a KV region is, with every operating system page present.
static inline char* MapRegion(const PageRun* run, int fill) {
  char* region = mmap(NULL, RegionBytes(run), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (region == MAP_FAILED) Fail("mmap");
  memset(region, fill, RegionBytes(run));
  return region;
}

static inline void PrintResult(const PageRun* run, const char* name, int64_t elapsed_ns) {
  const double num_bytes = (double)RegionBytes(run) * (double)run->num_rounds;
  printf("{\"name\": \"%s\", \"page_bytes\": %zu, \"num_bytes\": %.0f, \"elapsed_ns\": %" PRId64 "}\n", name,
         run->page_bytes, num_bytes, elapsed_ns);
}

#endif  // PDSERVE_BENCH_PAGE_RUN_H_
