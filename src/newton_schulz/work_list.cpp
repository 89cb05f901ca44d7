#include "newton_schulz/work_list.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "newton_schulz/segments.h"

namespace dmuon {
namespace {

using kernels::kBlock;
using kernels::kBox;
using kernels::kSignalsABlock;
using kernels::PanelWait;
using kernels::TileOp;
using kernels::WorkItem;

constexpr std::int64_t kLineElements = 8;     // the copy engine wants lines of whole 16 bytes
constexpr std::int64_t kAlignElements = 128;  // and we start each tensor at 256
constexpr int kWidestTile = 4;                // boxes; with narrower ones latency counts, not the number of stores
constexpr int kRowsInOrder = 16;              // block rows whose tiles are listed together, to share operands in L2

std::int64_t rounded_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }
int blocks_of(std::int64_t extent) { return static_cast<int>((extent + kBlock - 1) / kBlock); }

// A tensor and the counters that say which of its panels are written; base -1 if it was there from the start.
struct Panels {
  int tensor = -1;
  PanelWait ready;
};

// The square matrices of one slot.
struct Slot {
  std::array<int, 2> r{};
  std::array<int, 2> q{};
  int z = -1;
  int rz = -1;
  PanelWait free;  // the last product of the matrix that had the slot before
};

class Builder {
 public:
  Builder(std::span<const NsCoefficients> steps, const WorkOptions& options) : steps_(steps), options_(options) {}

  int add_tensor(std::int64_t rows, std::int64_t cols) {
    const std::int64_t ld = rounded_up(cols, kLineElements);
    list.tensors.push_back({list.arena_elements, rows, cols, ld});
    list.arena_elements += rounded_up(rows * ld, kAlignElements);
    return static_cast<int>(list.tensors.size()) - 1;
  }

  std::int32_t add_counters(int count) { return std::exchange(list.counter_count, list.counter_count + count); }

  Slot add_slot(std::int64_t n) {
    Slot slot;
    for (int* tensor : {&slot.r[0], &slot.r[1], &slot.q[0], &slot.q[1], &slot.z, &slot.rz}) *tensor = add_tensor(n, n);
    return slot;
  }

  /// The slot's tensors, seen as n x n: one slot serves matrices of different sizes.
  Slot slot_for(const Slot& slot, std::int64_t n) {
    Slot result = slot;
    for (int* tensor : {&result.r[0], &result.r[1], &result.q[0], &result.q[1], &result.z, &result.rz}) {
      if (list.tensors[static_cast<std::size_t>(*tensor)].rows == n) continue;
      list.tensors.push_back(
          {list.tensors[static_cast<std::size_t>(*tensor)].offset, n, n, rounded_up(n, kLineElements)});
      *tensor = static_cast<int>(list.tensors.size()) - 1;
    }
    return result;
  }

  /// The products of matrix `index`, in order, as indices into list.ops.  Sets the slot free for the next one.
  std::vector<int> add_matrix(const WorkMatrix& matrix, std::size_t index, Slot& slot, int alike);

  void add_tiles(int op, int alike);

  WorkList list;

 private:
  int width_of(const TileOp& op, int alike) const {
    return options_.width != 0 ? options_.width : tile_width(op, alike, options_.multiprocessors);
  }

  int width_of_squares(const WorkMatrix& matrix, int alike) const {
    TileOp op;
    op.rows = op.cols = op.depth = static_cast<std::int32_t>(std::min(matrix.rows, matrix.cols));
    op.symmetric = 1;
    return width_of(op, alike);
  }

  std::span<const NsCoefficients> steps_;
  const WorkOptions& options_;
};

// The products of one matrix.  n is its short side, m its long one; a tall X is used as it lies.
class Chain {
 public:
  Chain(Builder& builder, const WorkMatrix& matrix, const Slot& slot, bool half)
      : builder_(builder),
        slot_(slot),
        wide_(matrix.rows <= matrix.cols),
        half_(half),
        n_(std::min(matrix.rows, matrix.cols)),
        m_(std::max(matrix.rows, matrix.cols)) {
    x_[0].tensor = builder.add_tensor(matrix.rows, matrix.cols);
  }

  /// The segment's X is written to `tensor`.
  void add_segment(std::span<const NsCoefficients> steps, int prescale, int tensor);
  /// One that the next segment may write.
  int next_x();

  std::vector<int> ops;
  int x() const { return x_[static_cast<std::size_t>(current_)].tensor; }
  PanelWait finished;  // the last product, whole

 private:
  TileOp square(const Panels& a, const Panels& b, const Panels& c, double alpha, double beta, int d) const;
  Panels add_square(TileOp op);
  Panels gram();
  Panels quadratic(const Panels& r, const NsCoefficients& step, double down, const PanelWait& z_read, double gamma);
  Panels left(const Panels& r, const Panels& z, double a);
  Panels next_r(const Panels& z, const Panels& rz, double a, double scale);
  Panels next_q(const Panels& q, const Panels& z, double a);
  void apply(const Panels& q, double beta, double alpha, int tensor);

  Builder& builder_;
  const Slot& slot_;
  bool wide_;
  bool half_;  // the square matrices are half-stored
  std::int64_t n_;
  std::int64_t m_;
  std::array<Panels, 2> x_;
  int current_ = 0;
  std::size_t r_ = 0;  // which of the slot's r and q was written last
  std::size_t q_ = 0;
};

// D = alpha A B + beta C of n x n matrices, without what it waits for.
TileOp Chain::square(const Panels& a, const Panels& b, const Panels& c, double alpha, double beta, int d) const {
  TileOp op;
  op.a = a.tensor;
  op.b = b.tensor;
  op.c = c.tensor;
  op.alpha = static_cast<float>(alpha);
  op.beta = static_cast<float>(beta);
  op.d = d;
  op.depth = static_cast<std::int32_t>(n_);
  op.half_stored = half_ ? 3 : 0;
  return op;
}

// A symmetric n x n product.  Each of its panels is touched by as many blocks as there are panels.
Panels Chain::add_square(TileOp op) {
  const int panels = blocks_of(n_);
  op.rows = op.cols = static_cast<std::int32_t>(n_);
  op.symmetric = 1;
  if (half_) op.half_stored |= 4;
  op.signal_rows = op.signal_cols = builder_.add_counters(panels);
  ops.push_back(static_cast<int>(builder_.list.ops.size()));
  builder_.list.ops.push_back(op);
  return {op.d, {op.signal_rows, kSignalsABlock * panels}};
}

// R = X X^T, or X^T X of a tall X.  The first product of a matrix, so it also waits for the slot.
Panels Chain::gram() {
  const Panels& x = x_[static_cast<std::size_t>(current_)];
  r_ = 1 - r_;
  TileOp op;
  op.a = op.b = x.tensor;
  op.d = slot_.r[r_];
  op.depth = static_cast<std::int32_t>(m_);
  op.depth_major = wide_ ? 3 : 0;
  op.row_waits[0] = op.col_waits[0] = x.ready;
  if (ops.empty()) op.all_wait = slot_.free;
  return add_square(op);
}

// Z = b R + c R^2, and Q = Z + gamma I for the first step of a segment.  Overwrites Z, which the last product of Q may
// still read (`z_read`); all others that read it are done when R is.
Panels Chain::quadratic(const Panels& r, const NsCoefficients& step, double down, const PanelWait& z_read,
                        double gamma) {
  TileOp op = square(r, r, r, step.c * down * down, step.b * down, slot_.z);
  if (gamma != 0.0) {
    op.d2 = slot_.q[q_];
    op.gamma = static_cast<float>(gamma);
  }
  op.row_waits[0] = op.col_waits[0] = r.ready;
  op.row_waits[1] = op.col_waits[1] = z_read;
  return add_square(op);
}

// RZ = a R + R Z.  A panel of Z is written only after all of R.
Panels Chain::left(const Panels& r, const Panels& z, double a) {
  TileOp op = square(r, z, r, 1.0, a, slot_.rz);
  op.col_waits[0] = z.ready;
  return add_square(op);
}

// R <- scale (a RZ + Z RZ).  A panel of RZ is written after the panels of Z up to it, not after those beyond.
Panels Chain::next_r(const Panels& z, const Panels& rz, double a, double scale) {
  r_ = 1 - r_;
  TileOp op = square(z, rz, rz, scale, a * scale, slot_.r[r_]);
  op.row_waits[0] = z.ready;
  op.col_waits[0] = rz.ready;
  return add_square(op);
}

// Q <- a Q + Q Z.  Waits for both panels of Q: it overwrites the tensor that the product before read.
Panels Chain::next_q(const Panels& q, const Panels& z, double a) {
  q_ = 1 - q_;
  TileOp op = square(q, z, q, 1.0, a, slot_.q[q_]);
  op.row_waits[0] = q.ready;
  op.col_waits[0] = q.ready;
  op.col_waits[1] = z.ready;
  return add_square(op);
}

// X <- beta X + alpha Q X, or X Q of a tall X.  A panel of Q is written only after all of X.
void Chain::apply(const Panels& q, double beta, double alpha, int tensor) {
  const Panels& x = x_[static_cast<std::size_t>(current_)];
  Panels& next = x_[static_cast<std::size_t>(1 - current_)];
  TileOp op;
  op.a = wide_ ? q.tensor : x.tensor;
  op.b = wide_ ? x.tensor : q.tensor;
  op.c = x.tensor;
  op.alpha = static_cast<float>(alpha);
  op.beta = static_cast<float>(beta);
  op.d = next.tensor = tensor;
  op.rows = static_cast<std::int32_t>(wide_ ? n_ : m_);
  op.cols = static_cast<std::int32_t>(wide_ ? m_ : n_);
  op.depth = static_cast<std::int32_t>(n_);
  op.depth_major = wide_ ? 1 : 3;
  if (half_) op.half_stored = wide_ ? 1 : 2;
  (wide_ ? op.row_waits : op.col_waits)[0] = q.ready;
  const std::int32_t counters = builder_.add_counters(blocks_of(n_));
  (wide_ ? op.signal_rows : op.signal_cols) = counters;
  op.signal_all = builder_.add_counters(1);
  next.ready = {counters, kSignalsABlock * blocks_of(m_)};
  finished = {op.signal_all, kSignalsABlock * blocks_of(m_) * blocks_of(n_)};
  ops.push_back(static_cast<int>(builder_.list.ops.size()));
  builder_.list.ops.push_back(op);
  current_ = 1 - current_;
}

int Chain::next_x() {
  Panels& next = x_[static_cast<std::size_t>(1 - current_)];
  if (next.tensor < 0) next.tensor = builder_.add_tensor(wide_ ? n_ : m_, wide_ ? m_ : n_);
  return next.tensor;
}

// See run_segment in iteration.cpp.  Q's product comes after RZ's, on which more depends.
void Chain::add_segment(std::span<const NsCoefficients> steps, int prescale, int tensor) {
  const double down = std::ldexp(1.0, -prescale);
  const double down2 = down * down;
  Panels r = gram();
  Panels z = quadratic(r, steps[0], down2, {}, steps.size() > 1 ? steps[0].a : 0.0);
  if (steps.size() == 1) return apply(z, steps[0].a * down, down, tensor);

  Panels q = {slot_.q[q_], z.ready};
  PanelWait z_read;
  for (std::size_t i = 1; i < steps.size(); ++i) {
    const double a = steps[i - 1].a;
    const Panels rz = left(r, z, a);
    if (i > 1) {
      q = next_q(q, z, a);
      z_read = q.ready;
    }
    const double scale = i == 1 ? down2 : 1.0;
    r = next_r(z, rz, a, scale);
    z = quadratic(r, steps[i], 1.0, z_read, 0.0);
  }
  q = next_q(q, z, steps.back().a);
  apply(q, 0.0, down, tensor);
}

std::vector<int> Builder::add_matrix(const WorkMatrix& matrix, std::size_t index, Slot& slot, int alike) {
  const Slot sized = slot_for(slot, std::min(matrix.rows, matrix.cols));
  Chain chain(*this, matrix, sized, width_of_squares(matrix, alike) == kWidestTile);
  list.inputs[index] = chain.x();
  for (std::size_t begin = 0; begin < steps_.size();) {
    const std::size_t end = segment_end(matrix.restarts, begin, steps_.size());
    const bool to_caller = end == steps_.size() && options_.to_caller;
    const int tensor = to_caller ? kernels::kResultTensors + static_cast<int>(index) : chain.next_x();
    chain.add_segment(steps_.subspan(begin, end - begin), begin == 0 ? options_.prescale : 0, tensor);
    begin = end;
  }
  list.ops[static_cast<std::size_t>(chain.ops.back())].to_bfloat16 = options_.to_bfloat16 ? 1 : 0;
  list.results[index] = chain.x();
  slot.free = chain.finished;
  return chain.ops;
}

// Rows in groups, column by column: neighbours in the list share operands.  The last tile of a symmetric product's row
// is cut where the diagonal block ends; a group's narrow tiles come last, where they even out the load.
void Builder::add_tiles(int index, int alike) {
  TileOp& op = list.ops[static_cast<std::size_t>(index)];
  const int width = width_of(op, alike);
  op.width = width;
  const int rows = blocks_of(op.rows);
  const int cols = 2 * blocks_of(op.cols);
  for (int first = 0; first < rows; first += kRowsInOrder) {
    std::vector<WorkItem> narrow;
    for (int col = 0; col < cols; col += width) {
      for (int row = first; row < std::min(rows, first + kRowsInOrder); ++row) {
        const int end = op.symmetric != 0 ? 2 * (row + 1) : cols;
        if (col >= end) continue;
        const int boxes = std::min(width, end - col);
        std::vector<WorkItem>& to = boxes == width ? list.items : narrow;
        to.push_back({index, static_cast<std::int16_t>(row), static_cast<std::int16_t>(col), boxes});
      }
    }
    list.items.insert(list.items.end(), narrow.begin(), narrow.end());
  }
}

}  // namespace

// Clock cycles as measured on an H200: a step of 64 in depth, and what a tile takes besides.
int tile_width(const TileOp& op, int alike, int multiprocessors) {
  struct Cost {
    int boxes;
    double step;
    double tile;
  };
  constexpr std::array kCosts = {Cost{4, 1030.0, 6500.0}, Cost{2, 610.0, 4000.0}, Cost{1, 490.0, 2900.0}};
  const double rows = blocks_of(op.rows);
  const double boxes = op.symmetric != 0 ? rows * (rows + 1.0) : rows * 2.0 * blocks_of(op.cols);
  int best = 0;
  double least = 0.0;
  for (const Cost& cost : kCosts) {
    const double tiles = boxes / cost.boxes * alike;
    const double time = std::max(1.0, tiles / multiprocessors) * (cost.step * op.depth / kBox + cost.tile);
    if (best != 0 && time >= least) continue;
    best = cost.boxes;
    least = time;
  }
  return best;
}

WorkList make_work_list(std::span<const WorkMatrix> matrices, std::span<const NsCoefficients> steps,
                        const WorkOptions& options) {
  Builder builder(steps, options);
  builder.list.inputs.resize(matrices.size());
  builder.list.results.resize(matrices.size());
  std::int64_t n = 0;
  for (const WorkMatrix& matrix : matrices) n = std::max(n, std::min(matrix.rows, matrix.cols));
  std::vector<Slot> slots;
  const auto most = std::min<std::size_t>(static_cast<std::size_t>(options.slots), matrices.size());
  const std::size_t groups = (matrices.size() + most - 1) / most;
  const std::size_t slot_count = (matrices.size() + groups - 1) / groups;  // no small rest at the end
  for (std::size_t i = 0; i < slot_count; ++i) slots.push_back(builder.add_slot(n));

  for (std::size_t first = 0; first < matrices.size(); first += slot_count) {
    std::vector<std::vector<int>> chains;
    std::size_t longest = 0;
    for (std::size_t i = first; i < std::min(first + slot_count, matrices.size()); ++i) {
      chains.push_back(builder.add_matrix(matrices[i], i, slots[i - first], static_cast<int>(slot_count)));
      longest = std::max(longest, chains.back().size());
    }
    for (std::size_t k = 0; k < longest; ++k) {
      for (const std::vector<int>& chain : chains) {
        if (k < chain.size()) builder.add_tiles(chain[k], static_cast<int>(chains.size()));
      }
    }
  }
  builder.add_counters(1);
  return std::move(builder.list);
}

}  // namespace dmuon
