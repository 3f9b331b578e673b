// What a completion queue hands over: a write of ours that ended, or an immediate that arrived.

#ifndef PDSERVE_FABRIC_COMPLETION_H_
#define PDSERVE_FABRIC_COMPLETION_H_

#include <cstdint>

namespace pdserve::fabric {

struct Completion {
  enum class Kind {
    kWriteEnded,    // `context` is that of the write; `error` is 0 or a positive errno.
    kImmediate,     // A peer's write with `immediate` is in our memory.
    kUnattributed,  // An error that names no write of ours (a peer's connection broke, for example).
  };

  Kind kind;
  void* context = nullptr;
  uint32_t immediate = 0;
  int error = 0;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_COMPLETION_H_
