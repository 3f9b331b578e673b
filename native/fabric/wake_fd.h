// An eventfd: readable from Set until Clear.
//
// Thread safety: all.

#ifndef PDSERVE_FABRIC_WAKE_FD_H_
#define PDSERVE_FABRIC_WAKE_FD_H_

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace pdserve::fabric {

class WakeFd {
 public:
  // Throws std::system_error when the process has no descriptor left.
  WakeFd() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~WakeFd() { close(fd_); }
  WakeFd(const WakeFd&) = delete;
  WakeFd& operator=(const WakeFd&) = delete;

  void Set() { eventfd_write(fd_, 1); }
  void Clear() {
    eventfd_t ignored;
    eventfd_read(fd_, &ignored);
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_WAKE_FD_H_
