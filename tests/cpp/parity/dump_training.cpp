// Trains a small model on thread ranks and writes its final matrices: the C++ half of
// tests/distributed/test_cpp_parity.py, which trains the same model in Python and compares.
//
// usage: dmuon_dump_training RANKS z2|z3 fp32|bf16 STEPS FILE
//
// The file is the matrices in order (layers.0.up, layers.0.down, layers.1.up, ...), row by row, raw float32.  All
// initial values and data are closed forms of indices.  Muon: lr 0.002, weight decay 0.01.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <thread>

#include "dmuon/dedicate.h"
#include "dmuon/muon.h"
#include "dmuon/thread_communicator.h"

namespace {

constexpr int kLayers = 4;
constexpr std::int64_t kWidth = 24;
constexpr std::int64_t kHidden = 56;
constexpr std::int64_t kRows = 64;

struct Arguments {
  int ranks;
  bool reshard_after_forward;
  bool bf16;
  int steps;
  std::string path;
};

/// [rows, cols], fp32: entry i of the flattened tensor is scale * sin(step * i * i + shift), computed in fp64.  Without
/// the square the matrix has rank two, and Newton-Schulz magnifies the rounding errors in the rest of its gradient.
at::Tensor waves(std::int64_t rows, std::int64_t cols, double step, double shift, double scale) {
  const auto indices = at::arange(rows * cols, at::TensorOptions(at::kDouble));
  return (scale * at::sin(step * indices * indices + shift)).to(at::kFloat).view({rows, cols});
}

at::Tensor inputs(int rank, int step) { return waves(kRows, kWidth, 0.37 + 0.11 * rank, 1.3 * step, 1.0); }

struct Layer {
  at::Tensor up;
  at::Tensor down;

  explicit Layer(int index)
      : up(waves(kHidden, kWidth, 0.7, index, 1.0 / std::sqrt(static_cast<double>(kWidth))).requires_grad_()),
        down(waves(kWidth, kHidden, 0.9, index, 1.0 / std::sqrt(static_cast<double>(kHidden))).requires_grad_()) {}

  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    return x + at::linear(at::gelu(at::linear(x, up)), down);
  }
};

std::vector<dmuon::HookModule> hook_modules(const std::vector<Layer>& layers) {
  std::vector<dmuon::HookModule> modules;
  for (const auto& layer : layers) {
    const auto name = "layers." + std::to_string(modules.size());
    modules.push_back({name, {{name + ".up.weight", layer.up}, {name + ".down.weight", layer.down}}});
  }
  return modules;
}

at::Tensor loss_of(dmuon::Runtime& runtime, const std::vector<Layer>& layers, const at::Tensor& input) {
  const auto output = dmuon::call_root(runtime, [&] {
    auto x = input;
    for (int i = 0; i < kLayers; ++i) {
      x = dmuon::call_module(runtime, i, x,
                             [&](const at::Tensor& in) { return layers[static_cast<size_t>(i)].forward(in); });
    }
    return x;
  });
  return output.to(at::kFloat).pow(2).mean();
}

dmuon::DedicateOptions dedicate_options(const Arguments& arguments) {
  dmuon::DedicateOptions options;
  options.runtime.reshard_after_forward = arguments.reshard_after_forward;
  if (arguments.bf16) {
    options.runtime.param_dtype = at::kBFloat16;
    options.runtime.reduce_dtype = at::kFloat;
    options.runtime.cast_forward_inputs = true;
  }
  return options;
}

dmuon::MuonOptions muon_options() {
  dmuon::MuonOptions options;
  options.lr = 0.002;  // so that the order of sums, magnified by Newton-Schulz, stays near 1e-7 of a weight
  options.weight_decay = 0.01;
  options.ns = dmuon::make_ns_options("gram", 5, "polar_express");
  return options;
}

void step(dmuon::Runtime& runtime, std::map<std::string, at::Tensor>& momenta) {
  std::vector<dmuon::MuonMatrix> matrices;
  for (const auto& param : runtime.params()) {
    const auto gradient = param->reduced_grad();
    if (!gradient.defined()) continue;
    auto& momentum = momenta[param->name()];
    if (!momentum.defined()) momentum = at::zeros_like(gradient);
    matrices.push_back({param->name(), param->registered(), gradient, momentum});
  }
  static_cast<void>(dmuon::muon_step(matrices, muon_options()));
  for (const auto& param : runtime.params()) param->registered().mutable_grad() = at::Tensor();
}

using World = std::shared_ptr<dmuon::ThreadWorld>;

/// One rank.  `matrices`: [matrices], where each owner puts its own.
void train(const Arguments& arguments, int rank, const World& gather, const World& reduce,
           std::vector<at::Tensor>& matrices) {
  at::set_num_threads(1);
  std::vector<Layer> layers;
  for (int i = 0; i < kLayers; ++i) layers.emplace_back(i);
  const dmuon::RuntimeComms comms{dmuon::make_thread_communicator(gather, rank),
                                  dmuon::make_thread_communicator(reduce, rank), nullptr};
  const auto runtime = dmuon::dedicate(hook_modules(layers), comms, dedicate_options(arguments));
  std::map<std::string, at::Tensor> momenta;
  for (int i = 0; i < arguments.steps; ++i) {
    loss_of(*runtime, layers, inputs(rank, i)).backward();
    step(*runtime, momenta);
  }
  for (size_t i = 0; i < runtime->params().size(); ++i) {
    if (runtime->params()[i]->is_owner()) matrices[i] = runtime->params()[i]->registered().detach().contiguous();
  }
}

std::vector<at::Tensor> train_on_threads(const Arguments& arguments) {
  const auto gather = dmuon::make_thread_world(arguments.ranks);
  const auto reduce = dmuon::make_thread_world(arguments.ranks);
  std::vector<at::Tensor> matrices(2 * kLayers);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(arguments.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < arguments.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        train(arguments, rank, gather, reduce, matrices);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return matrices;
}

void write(const std::vector<at::Tensor>& matrices, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& matrix : matrices) {
    file.write(static_cast<const char*>(matrix.const_data_ptr()), static_cast<std::streamsize>(matrix.nbytes()));
  }
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: " << argv[0] << " RANKS z2|z3 fp32|bf16 STEPS FILE\n";
    return 2;
  }
  try {
    const Arguments arguments{std::stoi(argv[1]), std::string(argv[2]) == "z3", std::string(argv[3]) == "bf16",
                              std::stoi(argv[4]), argv[5]};
    write(train_on_threads(arguments), arguments.path);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
