#include "newton_schulz/list_interpreter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>

namespace dmuon::testing {

using kernels::kBlock;
using kernels::kBox;
using kernels::PanelWait;
using kernels::TileOp;
using kernels::WorkItem;

namespace {

// Rows and columns of a tile inside its product.
struct Area {
  std::int64_t row, rows, col, cols;
};

Area area_of(const TileOp& op, const WorkItem& item) {
  const std::int64_t row = std::int64_t{item.block_row} * kBlock;
  const std::int64_t col = std::min<std::int64_t>(std::int64_t{item.box_col} * kBox, op.cols);  // may lie beyond
  return {row, std::min<std::int64_t>(kBlock, op.rows - row), col,
          std::min<std::int64_t>(op.cols - col, std::int64_t{item.boxes} * kBox)};
}

// The square of kMirrorBoxes boxes that each row or column belongs to.
at::Tensor squares_of(std::int64_t n) { return at::arange(n).div(kernels::kMirrorBoxes * kBox, "floor"); }

int panels_of(std::int32_t extent) { return (extent + kBlock - 1) / kBlock; }

}  // namespace

ListInterpreter::ListInterpreter(const WorkList& list, const std::vector<at::Tensor>& inputs)
    : list_(list),
      arena_(at::full({list.arena_elements}, std::numeric_limits<double>::quiet_NaN(), at::kDouble)),
      counters_(static_cast<std::size_t>(list.counter_count)) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    view(list.inputs[i]).copy_(inputs[i]);
    results_.push_back(at::full_like(inputs[i], std::numeric_limits<double>::quiet_NaN()));
  }
}

at::Tensor ListInterpreter::view(int tensor) const {
  if (tensor >= kernels::kResultTensors) return results_[static_cast<std::size_t>(tensor - kernels::kResultTensors)];
  const ArenaMatrix& m = list_.tensors[static_cast<std::size_t>(tensor)];
  return arena_.as_strided({m.rows, m.cols}, {m.ld, 1}, m.offset);
}

at::Tensor ListInterpreter::result(std::size_t matrix) const { return view(list_.results[matrix]); }

bool ListInterpreter::may_start(const WorkItem& item) const {
  const TileOp& op = list_.ops[static_cast<std::size_t>(item.op)];
  const auto reached = [this](const PanelWait& wait, int panel) {
    return wait.base < 0 || counters_[static_cast<std::size_t>(wait.base + panel)] >= wait.target;
  };
  bool may = reached(op.all_wait, 0);
  for (const PanelWait& wait : op.row_waits) may = may && reached(wait, item.block_row);
  for (int panel = item.box_col / 2; 2 * panel < item.box_col + item.boxes && panel < panels_of(op.cols); ++panel) {
    for (const PanelWait& wait : op.col_waits) may = may && reached(wait, panel);
  }
  return may;
}

// What lies above the squares on the diagonal has not been written.
at::Tensor ListInterpreter::operand(int tensor, bool half_stored) const {
  const at::Tensor all = view(tensor);
  if (!half_stored) return all;
  const at::Tensor squares = squares_of(all.size(0));
  return at::where(squares.unsqueeze(1).ge(squares.unsqueeze(0)), all, all.t());
}

at::Tensor ListInterpreter::values_of(const WorkItem& item) const {
  const TileOp& op = list_.ops[static_cast<std::size_t>(item.op)];
  const Area area = area_of(op, item);
  const at::Tensor left = operand(op.a, (op.half_stored & 1) != 0);
  const at::Tensor right = operand(op.b, (op.half_stored & 2) != 0);
  const at::Tensor a = (op.depth_major & 1) != 0 ? left : left.t();
  const at::Tensor b = (op.depth_major & 2) != 0 ? right.t() : right;
  at::Tensor values = at::mm(a.narrow(0, area.row, area.rows), b.narrow(1, area.col, area.cols)) * double{op.alpha};
  if (op.beta != 0.0F) {
    values += view(op.c).narrow(0, area.row, area.rows).narrow(1, area.col, area.cols) * double{op.beta};
  }
  return values;
}

void ListInterpreter::write(int tensor, const WorkItem& item, const at::Tensor& values, double gamma) {
  const TileOp& op = list_.ops[static_cast<std::size_t>(item.op)];
  const auto [row, rows, col, cols] = area_of(op, item);
  const at::Tensor to = view(tensor);
  if (op.symmetric == 0) {
    to.narrow(0, row, rows).narrow(1, col, cols).copy_(values);
    return;
  }
  const at::Tensor dense = values.contiguous();
  const auto* from = dense.const_data_ptr<double>();
  auto* lines = to.data_ptr<double>();
  const std::int64_t ld = to.stride(0);
  constexpr std::int64_t kMirror = kernels::kMirrorBoxes * kBox;
  const bool whole = (op.half_stored & 4) == 0;
  for (std::int64_t i = row; i < row + rows; ++i) {
    for (std::int64_t j = col; j < col + cols && j <= i; ++j) {
      const double value = from[(i - row) * cols + j - col] + (i == j ? gamma : 0.0);
      lines[i * ld + j] = value;
      if (whole || i / kMirror == j / kMirror) lines[j * ld + i] = value;
    }
  }
}

void ListInterpreter::finish(const WorkItem& item, const at::Tensor& values) {
  const TileOp& op = list_.ops[static_cast<std::size_t>(item.op)];
  const bool symmetric = op.symmetric != 0;
  write(op.d, item, values, 0.0);
  if (op.d2 >= 0) write(op.d2, item, values, op.gamma);
  const auto add = [this](std::int32_t base, int panel, int boxes) {
    if (base >= 0) counters_[static_cast<std::size_t>(base + panel)] += 2 * boxes;  // two rows of boxes
  };
  const int last = std::min(2 * panels_of(op.cols), item.box_col + item.boxes);
  for (int box = item.box_col; box < last; ++box) {
    if (!symmetric || box / 2 != item.block_row) add(op.signal_cols, box / 2, 1);
    add(op.signal_rows, item.block_row, 1);
    add(op.signal_all, 0, 1);
  }
}

std::string ListInterpreter::run(int workers, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Running> running;
  std::vector<WorkItem> waiting;  // taken, not started: each holds a worker
  std::size_t next = 0;
  while (next < list_.items.size() || !waiting.empty() || !running.empty()) {
    while (next < list_.items.size() && running.size() + waiting.size() < static_cast<std::size_t>(workers)) {
      waiting.push_back(list_.items[next++]);
    }
    for (std::size_t i = 0; i < waiting.size();) {
      if (!may_start(waiting[i]) || random() % 3 == 0) {
        ++i;
        continue;
      }
      running.push_back({waiting[i], values_of(waiting[i])});
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (running.empty()) {
      if (std::none_of(waiting.begin(), waiting.end(), [this](const WorkItem& w) { return may_start(w); })) {
        return "deadlock at item " + std::to_string(next);
      }
      continue;
    }
    const std::size_t i = random() % running.size();
    const Running done = running[i];
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    if (!done.values.equal(values_of(done.item)))
      return "an operand changed under product " + std::to_string(done.item.op);
    finish(done.item, done.values);
  }
  return "";
}

}  // namespace dmuon::testing
