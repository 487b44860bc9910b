// Status: the result of every operation of the library that can fail. `core` and `ops` never throw, exit or print; a
// host translates a Status in exactly one function.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace polyop {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument,    // the caller is wrong: a shape, dtype, stride, device, attribute or value breaks the schema
  kUnsupported,        // the request is valid, but no kernel takes it; the text lists what each kernel wanted
  kResourceExhausted,  // a capacity is used up (pages, sequences); state is as before the call
  kCudaError,          // the CUDA runtime reported an error
  kInternal,           // a bug of this library
};

/// Short fixed name of a code, for logs and tests.
constexpr std::string_view status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kResourceExhausted:
      return "resource exhausted";
    case StatusCode::kCudaError:
      return "CUDA error";
    case StatusCode::kInternal:
      return "internal error";
  }
  return "unknown";
}

/// A code and a text. The ok state carries no allocation, so returning it costs one pointer.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : failure_(new Failure{code, std::move(message)}) {}

  static Status ok() { return {}; }

  [[nodiscard]] bool is_ok() const { return failure_ == nullptr; }
  [[nodiscard]] StatusCode code() const { return failure_ ? failure_->code : StatusCode::kOk; }
  /// The text without the code's name; empty when ok. Valid as long as this object lives.
  [[nodiscard]] const std::string& message() const {
    static const std::string kEmpty;
    return failure_ ? failure_->message : kEmpty;
  }

 private:
  struct Failure {
    StatusCode code;
    std::string message;
  };
  std::unique_ptr<Failure> failure_;
};

inline Status invalid_argument(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
inline Status unsupported(std::string message) { return {StatusCode::kUnsupported, std::move(message)}; }
inline Status resource_exhausted(std::string message) { return {StatusCode::kResourceExhausted, std::move(message)}; }
inline Status internal_error(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

}  // namespace polyop

/// Leaves the enclosing function with the Status of `expression` when it is not ok.
#define POLYOP_RETURN_IF_ERROR(expression)                                                              \
  do {                                                                                                  \
    if (::polyop::Status polyop_status_ = (expression); !polyop_status_.is_ok()) return polyop_status_; \
  } while (false)
