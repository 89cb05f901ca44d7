// Who owns what: assigns every matrix to one slot of the (shard, replicate) mesh.
//
// Called once at set-up, on every rank, with identical input; the answer is a pure function of that input, so no
// communication is needed and `Plan::fingerprint()` lets the ranks prove that they agree.  std only: no torch, no CUDA.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dmuon::plan {

/// Matrices of one layer with fewer elements than this share one owner (PlanOptions::small_matrix_threshold).
inline constexpr std::int64_t kSmallParamThreshold = 5'000'000;

/// What an owner does with a parameter: Muon on a whole matrix, or AdamW, element by element, on one of any shape.
enum class Kind { kMatrix, kElementwise };

/// One place that can own a matrix.
struct Slot {
  int shard = 0;
  int replicate = 0;

  auto operator<=>(const Slot&) const = default;
};

/// `count()` rows from `begin` on.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t count() const { return end - begin; }
};

/// Part `part` of `rows` rows over `parts` ranks, by DTensor's rule for Shard(0): parts of ceil(rows / parts) rows, the
/// last of them shorter, and nothing for the ranks after it.  Throws std::invalid_argument for a part that is not.
[[nodiscard]] RowRange row_range(std::int64_t rows, int parts, int part);

/// Which rows of a whole parameter a part of it has, and who owns them.
struct Part {
  std::int64_t first = 0;
  std::int64_t total = 0;  ///< rows of the whole parameter
  Slot owner;
};

/// One parameter selected for dedicated ownership, logically `rows x cols`: of an elementwise one the first dimension
/// and the product of the others.
struct Matrix {
  std::string name;  ///< fully qualified name, unique in a plan
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::string layer;  ///< matrices with equal keys belong to one layer; "" means a layer of its own
  Kind kind = Kind::kMatrix;
  std::optional<Part> part{};  ///< set by cut_by_rows: these are only some rows of a parameter

  [[nodiscard]] std::int64_t numel() const { return rows * cols; }
};

/// Sizes of the mesh axes; `replicate == 1` without a replicate mesh.
struct MeshShape {
  int shard = 1;
  int replicate = 1;

  [[nodiscard]] int slots() const { return shard * replicate; }
};

/// Elements from which on an elementwise parameter is cut by rows over all slots.
inline constexpr std::int64_t kCutElements = std::int64_t{1} << 22;

/// The parts of `whole`, in row order: one for each slot that gets rows.  As DTensor cuts by Shard(0) over the
/// replicate axis and then by Shard(0) over the shard axis.  `whole` itself if it is a matrix, has less than
/// `least_elements`, has less rows than there are slots, or if there is one slot.
[[nodiscard]] std::vector<Matrix> cut_by_rows(const Matrix& whole, MeshShape mesh,
                                              std::int64_t least_elements = kCutElements);

enum class OwnerStrategy { kLpt, kRoundRobin, kRank0 };

/// "lpt", "round_robin" or "rank0".  Throws std::invalid_argument that lists the known names.
[[nodiscard]] OwnerStrategy parse_owner_strategy(const std::string& name);

/// Predicted optimizer time of one matrix: Newton-Schulz FLOPs of the algorithm that runs for this shape, the
/// elementwise passes over it, and a constant per matrix; of an elementwise parameter the bytes that AdamW moves.  The
/// defaults describe one H200 with 16-bit matrix products.
struct CostModel {
  double flops_per_second = 600e12;
  double bytes_per_second = 4.0e12;
  double seconds_per_matrix = 10e-6;
  double elementwise_bytes = 32.0;  ///< bytes moved per element by momentum, normalisation, casts and the update
  double adamw_bytes = 28.0;        ///< likewise by AdamW, fused: reads four fp32 values and writes three
  int ns_steps = 5;

  /// FLOPs of the Newton-Schulz iteration chosen for this shape (standard below aspect 1.3, else Gram with one
  /// restart).
  [[nodiscard]] double flops(std::int64_t rows, std::int64_t cols) const;
  [[nodiscard]] double seconds(std::int64_t rows, std::int64_t cols) const;
  [[nodiscard]] double seconds(const Matrix& matrix) const;
};

struct PlanOptions {
  OwnerStrategy strategy = OwnerStrategy::kLpt;
  std::int64_t small_matrix_threshold = kSmallParamThreshold;  ///< elements; 0 turns merging off
  CostModel cost{};
  double target_imbalance = 1.02;                    ///< local search stops at this max/mean
  std::int64_t state_bytes_per_element = 8;          ///< of a matrix: fp32 master + fp32 momentum
  std::int64_t elementwise_state_bytes = 12;         ///< per element of an elementwise parameter: AdamW has two moments
  std::optional<std::int64_t> max_bytes_per_slot{};  ///< cap on owned state; unset means no cap

  /// Master and optimizer state.
  [[nodiscard]] std::int64_t state_bytes(const Matrix& matrix) const {
    return matrix.numel() * (matrix.kind == Kind::kMatrix ? state_bytes_per_element : elementwise_state_bytes);
  }
};

struct SlotLoad {
  double cost_seconds = 0.0;
  std::int64_t elements = 0;
  std::int64_t bytes = 0;  ///< of masters and optimizer state
  int matrices = 0;        ///< and elementwise parameters
};

/// The result: immutable after construction, indexed like the input matrices.
struct Plan {
  MeshShape mesh;
  std::vector<Matrix> matrices;
  std::vector<Slot> owners;          ///< [matrices]
  std::vector<double> costs;         ///< [matrices] predicted seconds
  std::vector<SlotLoad> loads;       ///< [slots], index = replicate * mesh.shard + shard
  double lower_bound_seconds = 0.0;  ///< no assignment of these units has a smaller maximum load
  std::string balance_note;          ///< why max/mean is not lower; empty when it meets the target

  [[nodiscard]] int slot_index(Slot slot) const { return slot.replicate * mesh.shard + slot.shard; }
  /// Largest slot cost divided by the mean slot cost; 1.0 for an empty plan.
  [[nodiscard]] double imbalance() const;
  /// 64-bit FNV-1a over mesh, names, shapes, kinds and owners: equal on all ranks or something is wrong.
  [[nodiscard]] std::uint64_t fingerprint() const;
  /// Fixed-width text table: per slot its matrices, bytes and predicted cost, then max/mean and the bound.
  [[nodiscard]] std::string table() const;
};

/// Longest-processing-time-first over all slots, columns balanced first and then the slots of the column, followed by a
/// bounded local search of moves and swaps.  Units of one layer go to distinct shard coordinates while balance allows;
/// where that misses the target, plain LPT is tried too and the better plan taken, so without a cap the largest load is
/// within Graham's bound (1969), 4/3 - 1/(3 slots) of the optimum.  Ties break by bytes, then by input order and slot
/// index.  Parts that cut_by_rows made stay with their owners, consecutive as it gave them, and count as load.
/// Throws std::invalid_argument (with the name of the matrix or option) for an empty list, a duplicate name, a size or
/// mesh axis below 1, a part outside the mesh or apart from the others of its parameter, a senseless option, or a cap
/// that cannot be met. O(P log P) plus the bounded search; 100 k matrices on 1024 slots take under 100 ms.
[[nodiscard]] Plan compute_balanced_assignment(std::vector<Matrix> matrices, MeshShape mesh,
                                               const PlanOptions& options = {});

/// Text both ranks can compare line by line: the first differing line names the parameter.  One line per matrix, with
/// the kind where it is elementwise.
[[nodiscard]] std::string describe_inputs(const std::vector<Matrix>& matrices);

/// Given every rank's `describe_inputs`, a message naming the first difference, or "" if all are equal.
[[nodiscard]] std::string first_difference(const std::vector<std::string>& descriptions);

}  // namespace dmuon::plan
