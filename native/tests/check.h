// The whole test harness: a test is a function that CHECKs, main runs them in order and names each.

#ifndef PDSERVE_TESTS_CHECK_H_
#define PDSERVE_TESTS_CHECK_H_

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

// Ends the process with the place and the expression; in force in every build type.
#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                              \
    }                                                                             \
  } while (false)

#define RUN(test)                          \
  do {                                     \
    std::fprintf(stderr, "  %s\n", #test); \
    test();                                \
  } while (false)

namespace pdserve::tests {

// Returns once `condition` holds; ends the process when it does not within 10 s.
inline void WaitUntil(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace pdserve::tests

#endif  // PDSERVE_TESTS_CHECK_H_
