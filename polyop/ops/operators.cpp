#include "polyop/ops/operators.h"

#include <cstdio>

#include "polyop/ops/circular_pad/circular_pad.h"

namespace polyop {

const OpRegistry& operators() {
  static const OpRegistry registry = [] {
    OpRegistry ops;
    for (auto* make : {make_circular_pad_operator}) {
      // A schema with defects is a bug that tests/cpp/ops catches; it leaves the operator out instead of ending the
      // process.
      if (const Status status = ops.add(make()); !status.is_ok()) {
        std::fprintf(stderr, "polyop: %s\n", status.message().c_str());
      }
    }
    return ops;
  }();
  return registry;
}

}  // namespace polyop
