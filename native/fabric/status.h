// The outcome of an operation of the fabric: what was tried, how it ended, and what to do.
//
// Thread safety: a value.

#ifndef PDSERVE_FABRIC_STATUS_H_
#define PDSERVE_FABRIC_STATUS_H_

#include <string>
#include <utility>

namespace pdserve::fabric {

class [[nodiscard]] Status {
 public:
  enum class Code {
    kOk,
    kInvalid,   // The caller's arguments are wrong; nothing was done.
    kFailed,    // libfabric or the system refused; `error` says why.
    kCapacity,  // Something bounded is full; try again later.
  };

  static Status Ok() { return Status(Code::kOk, "", 0, ""); }
  static Status Invalid(const char* call, std::string message);
  static Status Failed(const char* call, int error, std::string advice = "");
  static Status Capacity(const char* call, std::string message);

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  // The libfabric or system call; a static string.
  const char* call() const { return call_; }
  // A positive errno, 0 where there is none.
  int error() const { return error_; }
  const std::string& message() const { return message_; }

 private:
  Status(Code code, const char* call, int error, std::string message)
      : code_(code), call_(call), error_(error), message_(std::move(message)) {}

  Code code_;
  const char* call_;
  int error_;
  std::string message_;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_STATUS_H_
