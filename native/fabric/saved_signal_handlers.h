// Puts signal handlers back that libfabric's shm provider replaces when an endpoint is opened: ours (asyncio's) must
// stay, and shm's would call an ignored signal's handler.

#ifndef PDSERVE_FABRIC_SAVED_SIGNAL_HANDLERS_H_
#define PDSERVE_FABRIC_SAVED_SIGNAL_HANDLERS_H_

#include <array>
#include <csignal>
#include <cstddef>

namespace pdserve::fabric {

class SavedSignalHandlers {
 public:
  SavedSignalHandlers() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &saved_[i]);
  }
  ~SavedSignalHandlers() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &saved_[i], nullptr);
  }
  SavedSignalHandlers(const SavedSignalHandlers&) = delete;
  SavedSignalHandlers& operator=(const SavedSignalHandlers&) = delete;

 private:
  static constexpr std::array<int, 4> kSignals = {SIGBUS, SIGSEGV, SIGTERM, SIGINT};
  std::array<struct sigaction, 4> saved_;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_SAVED_SIGNAL_HANDLERS_H_
