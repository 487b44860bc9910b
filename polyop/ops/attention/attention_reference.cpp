#include <cmath>
#include <limits>

#include "polyop/core/numeric_types.h"
#include "polyop/ops/attention/attention_kernels.h"

namespace polyop {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

double read(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kF16:
      return static_cast<const F16*>(data)[index].to_float();
    case DType::kBF16:
      return static_cast<const BF16*>(data)[index].to_float();
    case DType::kF8E4M3:
      return static_cast<const F8E4M3*>(data)[index].to_float();
    default:
      return static_cast<const int8_t*>(data)[index];
  }
}

// An element times `factor`, rounded to its dtype.
double read_scaled(const void* data, DType dtype, int64_t index, float factor) {
  const double value = read(data, dtype, index);
  if (factor == 1.0f) return value;
  const auto product = static_cast<float>(value * factor);
  if (dtype == DType::kF16) return F16::from_float(product).to_float();
  return dtype == DType::kBF16 ? BF16::from_float(product).to_float() : product;
}

void write(void* data, DType dtype, int64_t index, double value) {
  const auto rounded = static_cast<float>(value);
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = rounded;
      break;
    case DType::kF16:
      static_cast<F16*>(data)[index] = F16::from_float(rounded);
      break;
    case DType::kBF16:
      static_cast<BF16*>(data)[index] = BF16::from_float(rounded);
      break;
    default:
      static_cast<F8E4M3*>(data)[index] = F8E4M3::from_float(rounded);
      break;
  }
}

// One (sequence, row, query head).
struct Row {
  const AttentionProblem& p;
  int64_t sequence;
  int64_t row;
  int64_t head;

  [[nodiscard]] int64_t kv_head() const { return head / p.group_size(); }

  [[nodiscard]] double bias(int64_t key) const {
    if (p.mask.data == nullptr || p.mask.dtype == DType::kBool) return 0.0;
    return read(p.mask.data, p.mask.dtype, p.mask.offset(sequence, head, row, key));
  }

  [[nodiscard]] bool sees(int64_t key) const {
    if (!p.tree_allows(sequence, row, key)) return false;
    if (p.mask.data == nullptr) return true;
    if (p.mask.dtype != DType::kBool) return bias(key) != kMinusInfinity;
    return static_cast<const uint8_t*>(p.mask.data)[p.mask.offset(sequence, head, row, key)] != 0;
  }

  [[nodiscard]] double score(int64_t key) const {
    const std::byte* q = p.row_address(p.q, sequence, row, head);
    const std::byte* k = p.key_address(p.k, sequence, key, kv_head());
    double dot = 0.0;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      dot += read_scaled(q, p.q.dtype, d, p.operand_scale) * read_scaled(k, p.k.dtype, d, p.operand_scale);
    }
    return dot * static_cast<double>(p.scale) * p.k_scale.of_head(kv_head()) + bias(key);
  }

  [[nodiscard]] double quantized(double weight) const {
    if (p.weight_quantization == AttentionWeightQuantization::kNone) return weight;
    const double scale = p.weight_scale != nullptr ? *p.weight_scale : p.weight_scale_value;
    const double steps = weight / scale;
    if (p.weight_quantization == AttentionWeightQuantization::kF8E4M3) {
      return F8E4M3::from_float(static_cast<float>(steps)).to_float() * scale;
    }
    return std::isnan(steps) ? steps : std::clamp(std::nearbyint(steps), -128.0, 127.0) * scale;
  }

  void set_output(int64_t d, double value) const {
    if (p.output_scale != nullptr) value /= *p.output_scale;
    write(p.row_address(p.out, sequence, row, head), p.out.dtype, d, value);
  }

  void set_lse(double value) const {
    if (p.lse.data != nullptr) write(p.row_address(p.lse, sequence, row, head), DType::kF32, 0, value);
  }

  void set_empty() const {
    for (int64_t d = 0; d < p.value_head_dim; ++d) set_output(d, 0.0);
    set_lse(kMinusInfinity);
  }

  // `weights` has room for kv_length(sequence) numbers; those of hidden keys are not used.
  void attend(double* weights) const {
    const IndexRange keys = p.visible_keys(sequence, row);
    const bool softmax = p.normalization == AttentionNormalization::kSoftmax;
    double denominator = 1.0;
    double max = kMinusInfinity;
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      if (!sees(key)) continue;
      weights[key] = score(key);
      if (weights[key] > max || std::isnan(weights[key])) max = weights[key];  // a NaN stays: nothing exceeds it
    }
    if (softmax) {
      if (max == kMinusInfinity) return set_empty();
      denominator = 0.0;
      if (p.sinks != nullptr) {
        if (p.sinks[head] > max) max = p.sinks[head];
        denominator += std::exp(p.sinks[head] - max);
      }
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        if (!sees(key)) continue;
        weights[key] = std::exp(weights[key] - max);
        denominator += weights[key];
      }
      set_lse(max + std::log(denominator));
    } else {
      set_lse(kMinusInfinity);
    }
    for (int64_t d = 0; d < p.value_head_dim; ++d) {
      double sum = 0.0;
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        if (!sees(key)) continue;
        const std::byte* v = p.key_address(p.v, sequence, key, kv_head());
        sum += quantized(weights[key] / denominator) * read(v, p.v.dtype, d);
      }
      set_output(d, sum * p.v_scale.of_head(kv_head()));
    }
  }
};

}  // namespace

int64_t attention_reference_workspace_bytes(const AttentionProblem& problem) {
  return problem.kv_capacity * static_cast<int64_t>(sizeof(double));
}

Status attention_reference(const AttentionProblem& problem, Workspace workspace, Stream) {
  auto* weights = static_cast<double*>(workspace.data);
  for (int64_t head = 0; head < problem.num_query_heads; ++head) {
    for (int64_t sequence = 0; sequence < problem.num_sequences; ++sequence) {
      for (int64_t row = 0; row < problem.allotted_query_length(sequence); ++row) {
        const Row one{problem, sequence, row, head};
        if (row < problem.query_length(sequence)) {
          one.attend(weights);
        } else {
          one.set_empty();
        }
      }
    }
    // Packed rows that belong to no sequence.
    for (int64_t row = problem.num_owned_rows(); row < problem.num_query_rows; ++row) {
      for (int64_t d = 0; d < problem.value_head_dim; ++d)
        write(problem.out.at(0, row, head), problem.out.dtype, d, 0.0);
      if (problem.lse.data != nullptr) write(problem.lse.at(0, row, head), DType::kF32, 0, kMinusInfinity);
    }
  }
  return Status::ok();
}

}  // namespace polyop
