// Runs a work list on the CPU in fp64 as several workers would, with the items overlapping at random.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "newton_schulz/work_list.h"

namespace dmuon::testing {

class ListInterpreter {
 public:
  /// inputs: one fp64 [rows, cols] a matrix, already normalised.
  ListInterpreter(const WorkList& list, const std::vector<at::Tensor>& inputs);

  /// Workers take items in list order, start one when what it waits for is signalled, and finish in random order. Every
  /// item reads its operands when it starts and again when it finishes.  Returns what went wrong: "" or a deadlock, or
  /// an item whose operands changed under it.
  [[nodiscard]] std::string run(int workers, std::uint64_t seed);

  [[nodiscard]] at::Tensor result(std::size_t matrix) const;

 private:
  struct Running {
    kernels::WorkItem item;
    at::Tensor values;
  };

  [[nodiscard]] bool may_start(const kernels::WorkItem& item) const;
  [[nodiscard]] at::Tensor values_of(const kernels::WorkItem& item) const;
  void finish(const kernels::WorkItem& item, const at::Tensor& values);
  void write(int tensor, const kernels::WorkItem& item, const at::Tensor& values, double gamma);
  [[nodiscard]] at::Tensor view(int tensor) const;
  [[nodiscard]] at::Tensor operand(int tensor, bool half_stored) const;

  const WorkList& list_;
  at::Tensor arena_;
  std::vector<at::Tensor> results_;  // of those outside the arena
  std::vector<std::int32_t> counters_;
};

}  // namespace dmuon::testing
