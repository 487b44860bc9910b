// The registry of the shipped operators: complete, documented, and every one with a reference to be checked against.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "polyop/ops/operators.h"

namespace polyop {
namespace {

/// The folder polyop/ops of the source tree.
std::filesystem::path ops_folder() { return std::filesystem::path(POLYOP_SOURCE_DIR) / "polyop" / "ops"; }

TEST(Registry, HoldsTheOperatorsOfTheLibrary) {
  for (const char* name : {"attention", "circular_pad", "int4_groupwise_gemm", "kv_cache_update", "qk_norm_rope_append",
                           "rotary_embedding"}) {
    EXPECT_NE(operators().find(name), nullptr) << name;
  }
  EXPECT_EQ(operators().find("no_such_operator"), nullptr);
  EXPECT_EQ(&operators(), &operators());
}

TEST(Registry, EveryFolderBelowOps_HasItsOperatorAndAReadme) {
  for (const auto& entry : std::filesystem::directory_iterator(ops_folder())) {
    if (!entry.is_directory()) continue;
    EXPECT_NE(operators().find(entry.path().filename().string()), nullptr) << entry.path();
    EXPECT_TRUE(std::filesystem::exists(entry.path() / "README.md")) << entry.path();
  }
}

TEST(Registry, EverySchema_IsWithoutDefectsAndDocumented) {
  std::set<std::string> names;
  for (const auto& op : operators().all()) {
    const OpSchema& schema = op->schema();
    SCOPED_TRACE(schema.name());
    EXPECT_TRUE(schema.defects().empty()) << schema.defects()[0];
    EXPECT_FALSE(schema.name().empty());
    EXPECT_FALSE(schema.doc().empty());
    EXPECT_TRUE(names.insert(schema.name()).second);
    bool seen_output = false;
    bool writes = false;
    for (const OperandSchema& operand : schema.operands()) {
      EXPECT_FALSE(operand.doc.empty()) << operand.name;
      EXPECT_FALSE(seen_output && operand.role != OperandRole::kOutput) << operand.name << " stands behind an output";
      seen_output = operand.role == OperandRole::kOutput;
      writes = writes || operand.is_written();
    }
    EXPECT_TRUE(writes) << "it changes nothing";
    for (const AttributeSchema& attribute : schema.attributes()) EXPECT_FALSE(attribute.doc.empty()) << attribute.name;
  }
}

TEST(Registry, TheReference_IsTheLastCpuKernel) {
  for (const auto& op : operators().all()) {
    SCOPED_TRACE(op->schema().name());
    std::string last_cpu_kernel;
    std::set<std::string> names;
    for (const KernelInfo& kernel : op->kernels()) {
      EXPECT_TRUE(names.insert(std::string(kernel.name)).second) << kernel.name << " is listed twice";
      if (kernel.device == DeviceType::kCpu) last_cpu_kernel = kernel.name;
    }
    EXPECT_EQ(last_cpu_kernel, "reference");
  }
}

}  // namespace
}  // namespace polyop
