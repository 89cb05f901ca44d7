#include "bindings/register.h"
#include "dmuon/muon.h"

namespace dmuon::bindings {
namespace {

/// The settings of a Muon optimizer that do not change from step to step.
struct MuonStepper : torch::CustomClassHolder {
  MuonStepper(const std::string& backend, int64_t steps, const std::string& coefficients,
              const std::string& adjust_lr) {
    options.ns = make_ns_options(backend, static_cast<int>(steps), coefficients);
    options.adjust_lr = parse_adjust_lr(adjust_lr);
  }
  MuonOptions options;
};

// rows: name, weight, gradient, momentum.  hyper: lr, momentum, weight_decay, nesterov.
std::vector<at::Tensor> step(const c10::intrusive_ptr<MuonStepper>& self,
                             const std::vector<std::tuple<std::string, at::Tensor, at::Tensor, at::Tensor>>& rows,
                             const std::tuple<double, double, double, bool>& hyper) {
  auto options = self->options;
  std::tie(options.lr, options.momentum, options.weight_decay, options.nesterov) = hyper;
  std::vector<MuonMatrix> matrices;
  for (const auto& [name, weight, grad, momentum] : rows) matrices.push_back({name, weight, grad, momentum});
  return muon_step(matrices, options);
}

std::optional<int64_t> workspace_bytes(const c10::intrusive_ptr<MuonStepper>& self,
                                       const std::vector<std::tuple<int64_t, int64_t>>& shapes, c10::Device device) {
  std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
  for (const auto& [rows, cols] : shapes) pairs.emplace_back(rows, cols);
  return muon_workspace_bytes(pairs, self->options.ns, device);
}

std::vector<at::Tensor> newton_schulz_op(const std::vector<at::Tensor>& matrices, const std::string& backend,
                                         int64_t steps, const std::string& coefficients) {
  return newton_schulz(matrices, make_ns_options(backend, static_cast<int>(steps), coefficients));
}

}  // namespace

void register_optim(torch::Library& library) {
  library.class_<MuonStepper>("MuonStepper")
      .def(torch::init<const std::string&, int64_t, const std::string&, const std::string&>())
      .def("step", &step)
      .def("workspace_bytes", &workspace_bytes);
  library.def("newton_schulz(Tensor[] matrices, str backend, int steps, str coefficients) -> Tensor[]",
              [](at::TensorList matrices, const std::string& backend, int64_t steps, const std::string& coefficients) {
                return newton_schulz_op(matrices.vec(), backend, steps, coefficients);
              });
}

}  // namespace dmuon::bindings
