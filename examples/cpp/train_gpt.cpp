// Trains a small byte-level GPT with dedicated ownership from C++ alone; the ranks are threads of this process.
//
//   dmuon_train_gpt [--ranks N] [--steps N] [--layers N] [--dim N] [--z2] FILE...
//
// The text is the files' bytes; the last twentieth is held out.  Muon steps the matrices of the layers on their owners,
// AdamW everything else on every rank.  Exits with 1 if the held-out loss did not fall or differs between ranks.
#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "dmuon/muon.h"
#include "dmuon/thread_communicator.h"
#include "gpt.h"

namespace {

struct Settings {
  GptConfig model;
  std::int64_t batch = 8;
  int ranks = 4;
  int steps = 100;
  bool z3 = true;
  std::vector<std::string> files;
};

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::atoi(argv[++i]) : 0; };
    if (word == "--ranks") {
      settings.ranks = number();
    } else if (word == "--steps") {
      settings.steps = number();
    } else if (word == "--layers") {
      settings.model.layers = number();
    } else if (word == "--dim") {
      settings.model.dim = number();
    } else if (word == "--z2") {
      settings.z3 = false;
    } else {
      settings.files.push_back(word);
    }
  }
  return settings;
}

/// All files as one int64 tensor of bytes.
torch::Tensor read_text(const std::vector<std::string>& files) {
  std::string text;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    text.append(std::istreambuf_iterator<char>(stream), {});
  }
  const auto bytes = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<std::uint8_t>());
  return bytes.to(torch::kLong);
}

/// [batch, seq + 1] windows at random places.
torch::Tensor sample(const torch::Tensor& text, std::int64_t batch, std::int64_t seq, torch::Generator& generator) {
  const auto begin = torch::randint(text.size(0) - seq - 1, {batch, 1}, generator, torch::kLong);
  return text.index({begin + torch::arange(seq + 1)});
}

torch::Tensor loss_of(Gpt& model, dmuon::Runtime& runtime, const torch::Tensor& windows) {
  const auto last = windows.size(1) - 1;
  const auto logits = model->forward(windows.narrow(1, 0, last), runtime);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), windows.narrow(1, 1, last).flatten());
}

/// Steps what this rank owns.
class Muon {
 public:
  explicit Muon(dmuon::RuntimePtr runtime) : runtime_(std::move(runtime)) {
    options_.weight_decay = 0.1;
    options_.ns = dmuon::make_ns_options("gram", 5, "polar_express");
  }

  void step(double lr_factor) {
    auto options = options_;
    options.lr *= lr_factor;
    std::vector<dmuon::MuonMatrix> matrices;
    for (const auto& param : runtime_->params()) {
      const auto gradient = param->reduced_grad();  // undefined on every rank but the owner
      if (!gradient.defined()) continue;
      auto& momentum = momenta_[param->name()];
      if (!momentum.defined()) momentum = torch::zeros_like(gradient);
      matrices.push_back({param->name(), param->registered(), gradient, momentum});
    }
    static_cast<void>(dmuon::muon_step(matrices, options));
    for (const auto& param : runtime_->params()) param->registered().mutable_grad() = torch::Tensor();
  }

 private:
  dmuon::RuntimePtr runtime_;
  dmuon::MuonOptions options_;
  std::map<std::string, torch::Tensor> momenta_;
};

/// What the ranks share.
struct Worlds {
  explicit Worlds(int ranks)
      : gather(dmuon::make_thread_world(ranks)),
        reduce(dmuon::make_thread_world(ranks)),
        rest(dmuon::make_thread_world(ranks)) {}
  std::shared_ptr<dmuon::ThreadWorld> gather, reduce, rest;
};

/// One rank's run.  Returns the held-out loss before and after.
std::pair<double, double> train(const Settings& settings, const Worlds& worlds, const torch::Tensor& text, int rank) {
  at::set_num_threads(1);
  const auto rest = dmuon::make_thread_communicator(worlds.rest, rank);
  Gpt model(settings.model);
  dmuon::DedicateOptions options;
  options.runtime.reshard_after_forward = settings.z3;
  options.plan.small_matrix_threshold = 0;
  const auto runtime = dmuon::dedicate(
      model->hook_modules(),
      {dmuon::make_thread_communicator(worlds.gather, rank), dmuon::make_thread_communicator(worlds.reduce, rank)},
      options);
  dmuon::broadcast_from_first(*rest, model->rest(), torch::kCPU);
  Muon muon(runtime);
  torch::optim::AdamW adamw(model->rest(), torch::optim::AdamWOptions(4e-3).betas({0.9, 0.95}).weight_decay(0.1));
  if (rank == 0) std::printf("%s\n", runtime->plan().table().c_str());

  const auto held_out = text.size(0) / 20;
  const auto training = text.narrow(0, 0, text.size(0) - held_out);
  auto same_on_all = torch::make_generator<at::CPUGeneratorImpl>(0);
  auto own = torch::make_generator<at::CPUGeneratorImpl>(1 + rank);
  const auto exam = sample(text.narrow(0, text.size(0) - held_out, held_out), 16, settings.model.seq, same_on_all);
  const auto examine = [&] {
    const torch::NoGradGuard no_grad;
    return loss_of(model, *runtime, exam).item<double>();
  };

  const double before = examine();
  for (int step = 0; step < settings.steps; ++step) {
    const auto loss = loss_of(model, *runtime, sample(training, settings.batch, settings.model.seq, own));
    loss.backward();
    dmuon::average_gradients(*rest, model->rest());
    const double left = 1.0 - static_cast<double>(step) / settings.steps;
    muon.step(left);
    for (auto& group : adamw.param_groups()) group.options().set_lr(4e-3 * left);
    adamw.step();
    adamw.zero_grad();
    if (rank == 0 && step % 10 == 0) std::printf("step %4d  loss of rank 0 %.3f\n", step, loss.item<double>());
  }
  return {before, examine()};
}

}  // namespace

int main(int argc, char** argv) {
  const auto settings = parse(argc, argv);
  const auto text = read_text(settings.files);
  if (text.size(0) < 40 * settings.model.seq) {
    std::fprintf(stderr, "dmuon_train_gpt: needs files with at least %d bytes of text in all\n",
                 static_cast<int>(40 * settings.model.seq));
    return 2;
  }
  const Worlds worlds(settings.ranks);
  std::vector<std::pair<double, double>> losses(static_cast<size_t>(settings.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    threads.emplace_back([&, rank] { losses[static_cast<size_t>(rank)] = train(settings, worlds, text, rank); });
  }
  for (auto& thread : threads) thread.join();

  const auto [before, after] = losses[0];
  const bool agree = std::all_of(losses.begin(), losses.end(), [&](const auto& each) { return each == losses[0]; });
  std::printf("held-out loss %.3f -> %.3f nats per byte; the ranks %s\n", before, after, agree ? "agree" : "DIFFER");
  return agree && after < before ? 0 : 1;
}
