// OpRegistry, Operator, kernel lists and call_operator over an operator made for the test.
#include "polyop/core/op_registry.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "polyop/core/call.h"

namespace polyop {
namespace {

struct AddProblem {
  const float* x = nullptr;
  float* out = nullptr;
  int64_t size = 0;
  double amount = 0.0;
};

template <int kTag>
Status add_kernel(const AddProblem& problem, Workspace workspace, Stream) {
  if (kTag == 2) static_cast<float*>(workspace.data)[problem.size - 1] = 1.0f;  // the scratch it asked for
  for (int64_t i = 0; i < problem.size; ++i) problem.out[i] = problem.x[i] + static_cast<float>(problem.amount) + kTag;
  return Status::ok();
}

Status takes_at_most_four(const AddProblem& problem) {
  return problem.size <= 4 ? Status::ok() : unsupported("size " + std::to_string(problem.size) + " is above 4");
}
Status takes_at_most_eight(const AddProblem& problem) {
  return problem.size <= 8 ? Status::ok() : unsupported("size " + std::to_string(problem.size) + " is above 8");
}

constexpr Kernel<AddProblem> kKernels[] = {
    {.name = "gpu",
     .device = DeviceType::kCuda,
     .supports = takes_at_most_four,
     .workspace_bytes = nullptr,
     .launch = add_kernel<9>},
    {.name = "small",
     .device = DeviceType::kCpu,
     .supports = takes_at_most_four,
     .workspace_bytes = nullptr,
     .launch = add_kernel<1>},
    {.name = "medium",
     .device = DeviceType::kCpu,
     .supports = takes_at_most_eight,
     .workspace_bytes = [](const AddProblem& problem) { return problem.size * 4; },
     .launch = add_kernel<2>},
};

std::unique_ptr<Operator> make_add(std::string name = "add") {
  OpSchema schema = SchemaBuilder(std::move(name), "Adds a number.")
                        .operand(input("x").dims({symbol("N")}).dtypes({DType::kF32}))
                        .operand(output("out").dims({symbol("N")}).dtype_of("x"))
                        .float_attribute("amount", 0.0, "what is added")
                        .build();
  const auto make_problem = [](const BoundCall& call, AddProblem* problem) {
    if (call.attributes[0].real < 0.0) return invalid_argument("add: amount is negative");
    *problem = {.x = static_cast<const float*>(call.tensor(0).data),
                .out = static_cast<float*>(call.tensor(1).data),
                .size = call.extent("N"),
                .amount = call.attributes[0].real};
    return Status::ok();
  };
  return std::make_unique<OperatorOver<AddProblem>>(std::move(schema), make_problem, std::span(kKernels));
}

TEST(OpRegistry, FindsByName_RefusesTwinsAndDefects) {
  OpRegistry registry;
  EXPECT_EQ(registry.find("add"), nullptr);
  ASSERT_TRUE(registry.add(make_add()).is_ok());
  ASSERT_TRUE(registry.add(make_add("add_again")).is_ok());
  EXPECT_EQ(registry.find("add")->schema().name(), "add");
  EXPECT_EQ(registry.all().size(), 2u);
  const Status twin = registry.add(make_add());
  EXPECT_EQ(twin.code(), StatusCode::kInternal);
  EXPECT_EQ(twin.message(), "add is registered twice");

  OpSchema defective = SchemaBuilder("broken", "d").operand(input("x").dtypes({DType::kF32})).build();
  const auto make_problem = [](const BoundCall&, AddProblem*) { return Status::ok(); };
  const Status defect =
      registry.add(std::make_unique<OperatorOver<AddProblem>>(std::move(defective), make_problem, std::span(kKernels)));
  EXPECT_EQ(defect.code(), StatusCode::kInternal);
  EXPECT_EQ(defect.message(), "broken: defective schema: x has no shape");
  EXPECT_EQ(registry.all().size(), 2u);
}

class CallOperator : public ::testing::Test {
 protected:
  std::unique_ptr<Operator> add = make_add();
  std::array<float, 16> x{};
  std::array<float, 16> out{};

  TensorView view(std::array<float, 16>& memory, int64_t size) {
    return TensorView::contiguous(memory.data(), DType::kF32, {size});
  }
  Status run(int64_t size, double amount = 10.0) {
    return call_operator(*add, {{"x", view(x, size)}, {"out", view(out, size)}},
                         {{"amount", AttributeValue::of_float(amount)}});
  }
};

TEST_F(CallOperator, RunsTheFirstKernelThatAgrees) {
  ASSERT_TRUE(run(3).is_ok());
  EXPECT_EQ(out[0], 11.0f);
  EXPECT_EQ(out[3], 0.0f);
  ASSERT_TRUE(run(5).is_ok());
  EXPECT_EQ(out[0], 12.0f);
}

TEST_F(CallOperator, RefusalListsEveryKernelOfTheDevice) {
  const Status status = run(9);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), "add: no kernel takes this call: small: size 9 is above 4; medium: size 9 is above 8");
  EXPECT_EQ(out[0], 0.0f);
}

TEST_F(CallOperator, WrongNamesAndProblems) {
  EXPECT_EQ(call_operator(*add, {{"y", view(x, 3)}}).message(), "add: there is no operand y");
  EXPECT_EQ(call_operator(*add, {{"x", view(x, 3)}}, {{"speed", AttributeValue::of_int(1)}}).message(),
            "add: there is no attribute speed");
  EXPECT_EQ(call_operator(*add, {{"x", view(x, 3)}}).message(), "add: out is missing");
  EXPECT_EQ(run(3, -1.0).message(), "add: amount is negative");
}

TEST_F(CallOperator, KernelByName_AndExplanation) {
  const TensorView x_view = view(x, 3);
  const TensorView out_view = view(out, 3);
  const std::array<const TensorView*, 2> operands = {&x_view, &out_view};
  const std::array<AttributeValue, 1> attributes = {AttributeValue::of_float(1.0)};
  BoundCall call;
  ASSERT_TRUE(bind_call(add->schema(), operands, attributes, &call).is_ok());
  HostWorkspaces workspaces;
  ASSERT_TRUE(add->run(call, workspaces, {}, "medium").is_ok());
  EXPECT_EQ(out[0], 3.0f);
  EXPECT_EQ(add->run(call, workspaces, {}, "huge").message(), "add: there is no kernel huge");

  std::vector<KernelVerdict> verdicts;
  ASSERT_TRUE(add->explain(call, &verdicts).is_ok());
  ASSERT_EQ(verdicts.size(), 1u);
  EXPECT_EQ(verdicts[0].kernel, "small");
  EXPECT_EQ(verdicts[0].refusal, "");
  const std::vector<KernelInfo> kernels = add->kernels();
  ASSERT_EQ(kernels.size(), 3u);
  EXPECT_EQ(kernels[0].name, "gpu");
  EXPECT_EQ(kernels[2].device, DeviceType::kCpu);
}

TEST(KernelList, DeviceWithoutKernels) {
  const Kernel<AddProblem>* chosen = nullptr;
  const std::span<const Kernel<AddProblem>> none;
  EXPECT_EQ(choose_kernel("add", none, DeviceType::kCuda, AddProblem{}, &chosen).message(),
            "add: no kernel takes this call: it has no CUDA kernel");
  EXPECT_EQ(choose_kernel("add", none, DeviceType::kCpu, AddProblem{}, &chosen).message(),
            "add: no kernel takes this call: it has no CPU kernel");
}

TEST(HostWorkspaces, GrowsAlignsAndKeeps) {
  HostWorkspaces workspaces;
  Workspace first;
  ASSERT_TRUE(workspaces.acquire({}, 100, &first).is_ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data) % kWorkspaceAlignment, 0u);
  EXPECT_GE(first.bytes, 100);
  Workspace smaller;
  ASSERT_TRUE(workspaces.acquire({}, 10, &smaller).is_ok());
  EXPECT_EQ(smaller.data, first.data);
  Workspace larger;
  ASSERT_TRUE(workspaces.acquire({}, 1 << 20, &larger).is_ok());
  static_cast<char*>(larger.data)[(1 << 20) - 1] = 1;
  EXPECT_EQ(workspaces.acquire({DeviceType::kCuda, 0}, 10, &larger).code(), StatusCode::kInvalidArgument);
}

TEST(HostWorkspaces, NoMemory_IsRefused_AndTheNextRequestIsServed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer ends the process at such a request";
#endif
  HostWorkspaces workspaces;
  Workspace workspace;
  const Status huge = workspaces.acquire({}, int64_t{1} << 60, &workspace);
  EXPECT_EQ(huge.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(huge.message(), "no memory for 1152921504606846976 bytes of workspace");
  EXPECT_TRUE(workspaces.acquire({}, 10, &workspace).is_ok());
}

TEST(HostWorkspaces, EachThreadHasItsOwn) {
  const HostWorkspaces* here = &HostWorkspaces::of_this_thread();
  const HostWorkspaces* there = nullptr;
  std::thread([&] { there = &HostWorkspaces::of_this_thread(); }).join();
  EXPECT_EQ(here, &HostWorkspaces::of_this_thread());
  EXPECT_NE(here, there);
}

}  // namespace
}  // namespace polyop
