// Status: codes, texts, and early return.
#include "polyop/core/status.h"

#include <gtest/gtest.h>

namespace polyop {
namespace {

TEST(Status, Default_IsOkAndCarriesNothing) {
  const Status status;
  EXPECT_TRUE(status.is_ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_TRUE(Status::ok().is_ok());
  EXPECT_EQ(sizeof(Status), sizeof(void*));
}

TEST(Status, Failures_CarryCodeAndText) {
  EXPECT_EQ(invalid_argument("a").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(unsupported("b").code(), StatusCode::kUnsupported);
  EXPECT_EQ(resource_exhausted("c").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(internal_error("d").code(), StatusCode::kInternal);
  const Status status = invalid_argument("q axis 1 is 3");
  EXPECT_FALSE(status.is_ok());
  EXPECT_EQ(status.message(), "q axis 1 is 3");
}

TEST(Status, Moved_KeepsTheText) {
  Status from = unsupported("no kernel");
  const Status to = std::move(from);
  EXPECT_EQ(to.code(), StatusCode::kUnsupported);
  EXPECT_EQ(to.message(), "no kernel");
}

TEST(Status, EveryCode_HasAName) {
  EXPECT_EQ(status_code_name(StatusCode::kOk), "ok");
  EXPECT_EQ(status_code_name(StatusCode::kInvalidArgument), "invalid argument");
  EXPECT_EQ(status_code_name(StatusCode::kUnsupported), "unsupported");
  EXPECT_EQ(status_code_name(StatusCode::kResourceExhausted), "resource exhausted");
  EXPECT_EQ(status_code_name(StatusCode::kCudaError), "CUDA error");
  EXPECT_EQ(status_code_name(StatusCode::kInternal), "internal error");
}

TEST(Status, ReturnIfError_LeavesAtTheFirstFailure) {
  int reached = 0;
  const auto run = [&](bool fail) -> Status {
    POLYOP_RETURN_IF_ERROR(Status::ok());
    ++reached;
    POLYOP_RETURN_IF_ERROR(fail ? internal_error("stop") : Status::ok());
    ++reached;
    return Status::ok();
  };
  EXPECT_TRUE(run(false).is_ok());
  EXPECT_EQ(reached, 2);
  EXPECT_EQ(run(true).message(), "stop");
  EXPECT_EQ(reached, 3);
}

}  // namespace
}  // namespace polyop
