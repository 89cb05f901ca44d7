// Random models, rank counts and training loops: what the property tests of the runtime train.
#pragma once

#include <random>

#include "runtime/trainer.h"

namespace dmuon {

struct MicroBatch {
  std::vector<Route> routes;  ///< [ranks]
  bool sync = true;
  bool across_replicas = true;     ///< false: the sums wait inside the replicas for a later micro-batch
  bool evaluates_first = false;    ///< a forward without grad before it
  bool evaluates_between = false;  ///< and between its forward and its backward
  bool joint = false;              ///< a second forward, on other data; one backward for both
  int backwards = 1;               ///< through the same graph
};

/// The same for the same seed.
struct RandomCase {
  explicit RandomCase(unsigned seed);

  TrainSetup setup;
  std::vector<std::vector<MicroBatch>> steps;

 private:
  int pick(int low, int high) { return low + static_cast<int>(random_() % static_cast<unsigned>(high - low + 1)); }
  bool one_in(int count) { return pick(1, count) == 1; }
  void make_shape();
  [[nodiscard]] bool sums_wait_inside_replicas() const;
  void add_in_double();
  Route route(bool repeats);
  MicroBatch micro_batch(bool last);

  std::mt19937 random_;
};

/// The case's story, for messages.
[[nodiscard]] std::string describe(const RandomCase& random);

/// The training loop of a case, which must outlive it.
[[nodiscard]] Body body_of(const RandomCase& random);

}  // namespace dmuon
