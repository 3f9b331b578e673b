#include "fabric/status.h"

#include <rdma/fabric.h>
#include <rdma/fi_errno.h>

#include <cerrno>

namespace pdserve::fabric {

Status Status::Invalid(const char* call, std::string message) {
  return Status(Code::kInvalid, call, EINVAL, std::string(call) + ": " + message);
}

Status Status::Failed(const char* call, int error, std::string advice) {
  std::string message = std::string(call) + " failed: " + fi_strerror(error);
  if (!advice.empty()) message += "; " + advice;
  return Status(Code::kFailed, call, error, std::move(message));
}

Status Status::Capacity(const char* call, std::string message) {
  return Status(Code::kCapacity, call, EAGAIN, std::string(call) + ": " + message);
}

}  // namespace pdserve::fabric
