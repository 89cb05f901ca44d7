// The same training loop twice: on ranks that are threads with dedicated ownership, and alone, as the reference.
//
// The reference keeps full weights, takes the mean of the ranks' gradients on their distinct data, and steps by the
// formulas written out; it shares no code with the runtime.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "dmuon/muon.h"
#include "dmuon/recording_communicator.h"
#include "runtime/toy_model.h"

namespace dmuon {

/// Wraps a communicator of a thread rank; `number` is different for every communicator of every rank.
using Decorate = std::function<CommunicatorPtr(CommunicatorPtr communicator, int number)>;

struct TrainSetup {
  ToyShape shape;
  int ranks = 2;     ///< in all; rank r has shard coordinate r % shards() and replicate coordinate r / shards()
  int replicas = 1;  ///< divides ranks
  bool reshard_after_forward = true;
  std::optional<at::ScalarType> param_dtype;  ///< with it, gradients are reduced in the masters' dtype
  bool muon = true;                           ///< false: SGD, for masters that are not fp32
  std::uint64_t seed = 1;
  std::optional<std::int64_t> small_matrix_threshold = 0;  ///< 0: every matrix is placed by itself
  bool trains_rest = true;                                 ///< false: what is not dedicated keeps its initial values
  bool reproducible = false;                               ///< of thread ranks: sums in a fixed tree
  bool publish_async = true;                               ///< with replicas: not waited for at the end of a step
  bool cut = false;                                        ///< SGD on matrices that are cut by rows over all ranks
  bool shares = false;                                     ///< communicators of thread ranks share memory
  Decorate decorate{};                                     ///< unset: none
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of waits for other thread ranks

  [[nodiscard]] int shards() const { return ranks / replicas; }
};

[[nodiscard]] MuonOptions muon_options();
/// [2, 9] tokens, int64: every rank, step and micro-batch has its own.
[[nodiscard]] at::Tensor batch(const TrainSetup& setup, int rank, int step, int micro);
/// For everything that Muon does not step.
void sgd(const at::Tensor& weight, const at::Tensor& gradient);

/// What a training loop does on one rank.
class Trainer {
 public:
  virtual ~Trainer() = default;
  [[nodiscard]] virtual int rank() const = 0;
  /// Forward on this rank's data for this step; `micro` selects one of its micro-batches.
  virtual at::Tensor loss(const Route& route, int micro) = 0;
  virtual void backward(const at::Tensor& loss, bool keep_graph) = 0;
  /// zero_grad.
  virtual void discard_gradients() = 0;
  /// Whether the next backwards reduce; nothing for the reference.
  virtual void set_sync(bool enabled) = 0;
  /// Null in the reference.
  [[nodiscard]] virtual Runtime* runtime() { return nullptr; }

  at::Tensor loss(const Route& route) { return loss(route, 0); }
  void backward(const at::Tensor& loss) { backward(loss, false); }
};

/// Called once a step and rank, before the optimizer steps.
using Body = std::function<void(Trainer& trainer, int step)>;

struct Trained {
  std::map<std::string, at::Tensor> weights;                 ///< full weights at the end
  std::map<std::string, at::Tensor> momenta;                 ///< of thread ranks, at the end
  std::vector<std::map<std::string, at::Tensor>> gradients;  ///< [steps] mean gradients that thread ranks stepped with
  std::vector<CommStats> traffic;                            ///< [steps] of gathers and stage 1, summed over ranks
  std::vector<CommStats> replicate_traffic;                  ///< [steps] of stage 2 and publishes, summed over ranks
  std::vector<std::set<std::string>> stepped;                ///< [steps] dedicated matrices that had a gradient
};

[[nodiscard]] Trained train_on_threads(const TrainSetup& setup, int steps, const Body& body);
[[nodiscard]] Trained train_alone(const TrainSetup& setup, int steps, const Body& body);

/// Largest over the weights of |a - b| / |b|.
[[nodiscard]] double relative_error(const Trained& a, const Trained& b);

/// Expects equal bits in weights, momenta and gradients.
void expect_same_bits(const Trained& a, const Trained& b);

/// Trains both ways and expects equal weights (1e-6 relative, and 1e-12 for fp64) and equal sets of stepped matrices.
/// Returns the error.
double expect_parity(const TrainSetup& setup, int steps, const Body& body);

}  // namespace dmuon
