#include "runtime/random_case.h"

#include <algorithm>

namespace dmuon {
namespace {

void run_micro_batch(Trainer& trainer, const MicroBatch& micro, int index) {
  const auto& route = micro.routes[static_cast<size_t>(trainer.rank())];
  const auto evaluate = [&](bool wanted) {
    const at::NoGradGuard no_grad;
    if (wanted) static_cast<void>(trainer.loss(route, 10 + index));
  };
  trainer.set_sync(micro.sync);
  if (auto* runtime = trainer.runtime()) runtime->set_requires_all_reduce(micro.across_replicas);
  evaluate(micro.evaluates_first);
  auto loss = trainer.loss(route, index);
  if (micro.joint) loss = loss + trainer.loss(route, 20 + index);
  evaluate(micro.evaluates_between);
  for (int i = micro.backwards; i > 0; --i) trainer.backward(loss, i > 1);
}

std::string describe(const TrainSetup& setup) {
  const auto& shape = setup.shape;
  return c10::str(setup.ranks, " ranks, ", setup.replicas, " replicas ", setup.publish_async ? "async, " : "sync, ",
                  setup.reshard_after_forward ? "Z3, " : "Z2, ", setup.shares ? "shared memory, " : "",
                  setup.cut ? "cut, " : "", shape.blocks, " blocks", shape.nested ? ", nested" : "",
                  setup.param_dtype ? ", bf16" : "", shape.trains_embedding ? "" : ", frozen embedding", ", frozen {",
                  c10::Join(" ", shape.frozen), "}\n");
}

std::string describe(const MicroBatch& micro) {
  auto text = c10::str("  ", micro.evaluates_first ? "evaluate, " : "", "forward, ", micro.joint ? "forward, " : "",
                       micro.evaluates_between ? "evaluate, " : "", micro.backwards, " x backward ",
                       micro.sync ? "" : "without sync ", micro.across_replicas ? "" : "inside replicas ",
                       "on routes by rank:");
  for (const auto& route : micro.routes) text += c10::str(" [", c10::Join(" ", route), "]");
  return text + "\n";
}

}  // namespace

RandomCase::RandomCase(unsigned seed) : random_(seed) {
  setup.seed = seed;
  setup.shares = seed % 2 == 1;
  setup.replicas = one_in(2) ? pick(2, 3) : 1;
  setup.ranks = setup.replicas * (setup.replicas == 1 ? pick(1, 4) : pick(1, 5 - setup.replicas));
  setup.publish_async = one_in(2);
  setup.reshard_after_forward = pick(0, 1) == 1;
  if (one_in(4)) setup.param_dtype = at::kBFloat16;
  if (one_in(4)) setup.small_matrix_threshold = std::nullopt;
  make_shape();
  steps.resize(2);
  for (auto& step : steps) {
    const int count = pick(1, 3);
    for (int i = 0; i < count; ++i) step.push_back(micro_batch(i + 1 == count));
  }
  if (sums_wait_inside_replicas()) add_in_double();
  setup.cut = one_in(3);
  if (setup.cut) setup.muon = false;
}

bool RandomCase::sums_wait_inside_replicas() const {
  return setup.replicas > 1 && std::any_of(steps.begin(), steps.end(), [](const auto& step) {
           return std::any_of(step.begin(), step.end(), [](const auto& micro) { return !micro.across_replicas; });
         });
}

// Micro-batches are then added in another order than in the reference, and Newton-Schulz magnifies what fp32 rounds.
void RandomCase::add_in_double() {
  setup.shape.dtype = at::kDouble;
  setup.param_dtype = std::nullopt;
  setup.muon = false;
}

void RandomCase::make_shape() {
  auto& shape = setup.shape;
  shape.blocks = pick(1, 5);
  shape.width = pick(2, 7);
  shape.hidden = pick(1, 9);
  shape.nested = one_in(3);
  shape.trains_embedding = !one_in(4);
  for (const auto& module : ToyModel(shape, 0).hook_modules()) {
    for (const auto& [name, weight] : module.matrices) {
      if (one_in(8)) shape.frozen.insert(name);
    }
  }
}

// Blocks in any order, any of them left out, some twice.
Route RandomCase::route(bool repeats) {
  Route result;
  for (int block = 0; block < setup.shape.blocks; ++block) {
    if (!one_in(3)) result.push_back(block);
    if (repeats && one_in(5)) result.push_back(block);
  }
  if (one_in(2)) std::shuffle(result.begin(), result.end(), random_);
  return result;
}

// Z3 frees a matrix after each use, so ranks that use one twice must do so alike.  In bf16 autograd sums the uses of a
// leaf in bf16, which the reference does not.
MicroBatch RandomCase::micro_batch(bool last) {
  MicroBatch micro;
  const bool alike = one_in(3);
  const bool repeats = !setup.param_dtype && (alike || !setup.reshard_after_forward);
  for (int rank = 0; rank < setup.ranks; ++rank) {
    micro.routes.push_back(alike && rank > 0 ? micro.routes[0] : route(repeats));
  }
  micro.sync = last || one_in(2);
  micro.across_replicas = last || one_in(2);
  micro.evaluates_first = one_in(6);
  micro.evaluates_between = one_in(6);
  micro.joint = !setup.param_dtype && one_in(6);
  micro.backwards = one_in(6) ? 2 : 1;
  return micro;
}

std::string describe(const RandomCase& random) {
  auto text = describe(random.setup);
  for (const auto& step : random.steps) {
    text += "step\n";
    for (const auto& micro : step) text += describe(micro);
  }
  return text;
}

Body body_of(const RandomCase& random) {
  return [&random](Trainer& trainer, int step) {
    int index = 0;
    for (const auto& micro : random.steps[static_cast<size_t>(step)]) run_micro_batch(trainer, micro, index++);
  };
}

}  // namespace dmuon
