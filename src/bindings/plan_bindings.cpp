#include "bindings/handles.h"
#include "bindings/register.h"

namespace dmuon::bindings {
namespace {

// name, {rows, columns} or of a part {rows, columns, first row, rows of the whole, shard, replicate}, layer,
// elementwise
using Rows = std::vector<std::tuple<std::string, std::vector<int64_t>, std::string, bool>>;

std::vector<plan::Matrix> to_matrices(const Rows& rows) {
  std::vector<plan::Matrix> matrices;
  for (const auto& [name, shape, layer, elementwise] : rows) {
    const auto kind = elementwise ? plan::Kind::kElementwise : plan::Kind::kMatrix;
    matrices.push_back({name, shape.at(0), shape.at(1), layer, kind});
    if (shape.size() == 2) continue;
    const plan::Slot owner{static_cast<int>(shape.at(4)), static_cast<int>(shape.at(5))};
    matrices.back().part = plan::Part{shape.at(2), shape.at(3), owner};
  }
  return matrices;
}

// What `to_matrices` takes of each part of an elementwise parameter: its name and numbers; of one that stays whole {}.
std::vector<std::tuple<std::string, std::vector<int64_t>>> cut_by_rows(const std::string& name, int64_t rows,
                                                                       int64_t cols, std::vector<int64_t> mesh,
                                                                       int64_t least_elements) {
  const plan::MeshShape shape{static_cast<int>(mesh.at(0)), static_cast<int>(mesh.at(1))};
  std::vector<std::tuple<std::string, std::vector<int64_t>>> parts;
  for (const auto& part : plan::cut_by_rows({name, rows, cols, "", plan::Kind::kElementwise}, shape, least_elements)) {
    if (!part.part) continue;
    const auto& [first, total, owner] = *part.part;
    parts.push_back({part.name, {part.rows, cols, first, total, owner.shard, owner.replicate}});
  }
  return parts;
}

// std::invalid_argument becomes c10::ValueError, which Python sees as ValueError.
PlanPtr make_plan(const Rows& rows, int64_t shard, int64_t replicate, const std::string& strategy,
                  int64_t small_matrix_threshold) {
  try {
    plan::PlanOptions options;
    options.strategy = plan::parse_owner_strategy(strategy);
    options.small_matrix_threshold = small_matrix_threshold;
    const plan::MeshShape mesh{static_cast<int>(shard), static_cast<int>(replicate)};
    return c10::make_intrusive<PlanHandle>(plan::compute_balanced_assignment(to_matrices(rows), mesh, options));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

std::vector<std::tuple<int64_t, int64_t>> owners(const PlanPtr& self) {
  std::vector<std::tuple<int64_t, int64_t>> result;
  for (const auto& slot : self->plan.owners) result.emplace_back(slot.shard, slot.replicate);
  return result;
}

// Per slot: predicted seconds, bytes of master and momentum, number of matrices.
std::vector<std::tuple<double, int64_t, int64_t>> loads(const PlanPtr& self) {
  std::vector<std::tuple<double, int64_t, int64_t>> result;
  for (const auto& load : self->plan.loads) result.emplace_back(load.cost_seconds, load.bytes, load.matrices);
  return result;
}

}  // namespace

void register_plan(torch::Library& library) {
  library.class_<PlanHandle>("Plan")
      .def(torch::init(&make_plan))
      .def("owners", &owners)
      .def_static("cut_by_rows", &cut_by_rows)
      .def("costs", [](const PlanPtr& self) { return self->plan.costs; })
      .def("loads", &loads)
      .def("lower_bound", [](const PlanPtr& self) { return self->plan.lower_bound_seconds; })
      .def("imbalance", [](const PlanPtr& self) { return self->plan.imbalance(); })
      .def("balance_note", [](const PlanPtr& self) { return self->plan.balance_note; })
      .def("fingerprint", [](const PlanPtr& self) { return static_cast<int64_t>(self->plan.fingerprint()); })
      .def("table", [](const PlanPtr& self) { return self->plan.table(); });
  library.def("small_param_threshold() -> int", [] { return plan::kSmallParamThreshold; });
  library.def("cut_elements() -> int", [] { return plan::kCutElements; });
}

}  // namespace dmuon::bindings
