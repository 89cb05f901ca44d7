#include "bindings/handles.h"
#include "bindings/register.h"
#include "dmuon/checkpoint.h"
#include "dmuon/runtime.h"
#include "dmuon/safetensors.h"

namespace dmuon::bindings {
namespace {

using Entries = std::vector<std::tuple<std::string, std::vector<int64_t>, std::string>>;  // key, sizes, sharding

std::vector<StateEntry> to_entries(const Entries& entries) {
  std::vector<StateEntry> result;
  for (const auto& [key, sizes, sharding] : entries) result.push_back({key, sizes, sharding});
  return result;
}

// [rows, ...] as [rows, elements of a row], which is what travels: the same memory, if it is contiguous.
at::Tensor as_rows(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 2) return tensor;
  return tensor.reshape({tensor.size(0), c10::multiply_integers(tensor.sizes().slice(1))});
}

/// One model's matrices and elementwise parameters on their way into and out of a checkpoint: masters, and whatever
/// else an owner keeps for one.
struct CheckpointHandle : torch::CustomClassHolder {
  CheckpointHandle(RuntimePtr model, const CommunicatorHandlePtr& shard,
                   const std::optional<CommunicatorHandlePtr>& replicate)
      : runtime(std::move(model)), axes{shard->communicator, replicate ? (*replicate)->communicator : nullptr} {}

  [[nodiscard]] MatrixPlace place(int64_t index) const {
    const auto& param = *runtime->params().at(static_cast<size_t>(index));
    const auto options = param.registered().options().device(param.unsharded().device()).requires_grad(std::nullopt);
    const auto sizes = at::IntArrayRef(param.sizes());
    return {param.name(), sizes[0], c10::multiply_integers(sizes.slice(1)), param.owner(), options};
  }

  /// `count` rows of the parameter in its own number of dimensions.
  [[nodiscard]] std::vector<int64_t> shape_of_rows(int64_t index, int64_t count) const {
    auto shape = runtime->params().at(static_cast<size_t>(index))->sizes();
    shape[0] = count;
    return shape;
  }

  RuntimePtr runtime;
  CheckpointAxes axes;
};

using OptimizerGroups = std::vector<std::tuple<bool, int64_t, int64_t>>;  // muon, parameters, format version
using Tensors = std::vector<std::tuple<std::string, at::ScalarType, std::vector<int64_t>>>;  // name, dtype, sizes

struct WriterHandle : torch::CustomClassHolder {
  WriterHandle(const std::string& path, const std::vector<FileTensor>& tensors) : writer(path, tensors) {}
  SafetensorsWriter writer;
};

using CheckpointPtr = c10::intrusive_ptr<CheckpointHandle>;

// Every rank comes here before the first matrix of a state travels: nothing is wrong with what any rank was given, no
// matrix is left on the meta device, and no other communication is under way.
void begin(const CheckpointPtr& self, const std::string& caller, std::string problem, const Entries& expected,
           const Entries& given, bool strict) {
  try {
    self->runtime->materialize();
  } catch (const std::exception& error) {
    if (problem.empty()) problem = error.what();
  }
  const auto entries = to_entries(given);
  if (problem.empty()) problem = state_problem(to_entries(expected), entries, strict);
  agree_on_state(self->axes, caller, problem, describe_state(entries));
  self->runtime->settle();
}

at::Tensor scatter(const CheckpointPtr& self, int64_t index, const std::optional<at::Tensor>& owned) {
  const auto rows = scatter_rows(self->axes, self->place(index), as_rows(owned.value_or(at::Tensor())));
  return rows.view(self->shape_of_rows(index, rows.size(0)));
}

plan::RowRange rows_here(const CheckpointPtr& self, const MatrixPlace& place) {
  return plan::row_range(place.rows, self->axes.shard->size(), self->axes.shard->rank());
}

// `value`: this rank's rows, or the whole matrix on every rank.
void gather(const CheckpointPtr& self, int64_t index, const at::Tensor& value, bool whole,
            const std::optional<at::Tensor>& owned) {
  const auto place = self->place(index);
  const auto range = rows_here(self, place);
  const auto rows = as_rows(whole ? value.narrow(0, range.begin, range.count()) : value);
  gather_rows(self->axes, place, rows, owned ? owned->view({place.rows, place.cols}) : at::Tensor());
}

at::Tensor empty_rows(const CheckpointPtr& self, int64_t index, c10::Device device) {
  const auto place = self->place(index);
  return at::empty(self->shape_of_rows(index, rows_here(self, place).count()), place.options.device(device));
}

std::string problem_of_groups(const OptimizerGroups& expected, const OptimizerGroups& given) {
  const auto to_groups = [](const OptimizerGroups& rows) {
    std::vector<OptimizerGroup> groups;
    for (const auto& [muon, params, version] : rows) groups.push_back({muon, params, version});
    return groups;
  };
  return groups_problem(to_groups(expected), to_groups(given));
}

void check_directory(const std::string& directory, int64_t part, int64_t parts) {
  const auto problem = directory_problem(directory, static_cast<int>(part), static_cast<int>(parts));
  TORCH_CHECK(problem.empty(), problem);
}

void commit(const CheckpointPtr& self, const std::string& path, const std::string& prefix, const std::string& plans) {
  commit_directory(self->axes, path, prefix, plans);
}

c10::intrusive_ptr<WriterHandle> make_writer(const std::string& path, const Tensors& tensors) {
  std::vector<FileTensor> rows;
  for (const auto& [name, dtype, sizes] : tensors) rows.push_back({name, dtype, sizes});
  return c10::make_intrusive<WriterHandle>(path, rows);
}

}  // namespace

void register_checkpoint(torch::Library& library) {
  library.class_<CheckpointHandle>("Checkpoint")
      .def(torch::init<RuntimePtr, const CommunicatorHandlePtr&, const std::optional<CommunicatorHandlePtr>&>())
      .def("begin", &begin)
      .def("scatter", &scatter)
      .def("gather", &gather)
      .def("empty_rows", &empty_rows)
      .def("commit", &commit)
      .def_static("begin_directory", &begin_directory)
      .def_static("check_directory", &check_directory)
      .def_static("groups_problem", &problem_of_groups);
  library.class_<WriterHandle>("SafetensorsWriter")
      .def(torch::init(&make_writer))
      .def("write",
           [](const c10::intrusive_ptr<WriterHandle>& self, const at::Tensor& tensor) { self->writer.write(tensor); })
      .def("close", [](const c10::intrusive_ptr<WriterHandle>& self) { self->writer.close(); });
  library.def("checkpoint_version() -> int", [] { return kCheckpointVersion; });
}

}  // namespace dmuon::bindings
