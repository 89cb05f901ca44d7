#include <ATen/ATen.h>

#include "dmuon/checkpoint.h"

namespace dmuon {
namespace {

std::int64_t largest_part(std::int64_t rows, int parts) { return (rows + parts - 1) / parts; }

void check_owned(const MatrixPlace& place, const at::Tensor& owned) {
  const std::vector<std::int64_t> sizes{place.rows, place.cols};
  TORCH_CHECK(
      owned.defined() && !owned.is_meta() && owned.sizes() == sizes &&
          owned.scalar_type() == c10::typeMetaToScalarType(place.options.dtype()),
      "[dmuon.checkpoint] matrix '", place.name, "': its owner must hold ", place.rows, " x ", place.cols,
      " values of dtype ", place.options.dtype(), ", found ",
      owned.defined() ? c10::str(owned.sizes(), " of ", owned.scalar_type(), " on ", owned.device()) : "nothing",
      ". If the model was built on the meta device, call to_empty and initialise it first.");
}

at::Tensor padded(const at::Tensor& rows, std::int64_t count) {
  return rows.size(0) == count ? rows : at::constant_pad_nd(rows, {0, 0, 0, count - rows.size(0)});
}

// Parts of equal size: full ones are views of the matrix, a shorter one is padded, an empty one may hold anything.
std::vector<at::Tensor> parts_of(const at::Tensor& matrix, int count) {
  const auto whole = matrix.contiguous();
  const auto part_rows = largest_part(whole.size(0), count);
  std::vector<at::Tensor> parts;
  for (int part = 0; part < count; ++part) {
    const auto range = plan::row_range(whole.size(0), count, part);
    const auto rows = whole.narrow(0, range.begin, range.count());
    parts.push_back(range.count() == 0 ? parts.front() : padded(rows, part_rows).reshape({-1}));
  }
  return parts;
}

}  // namespace

std::vector<Communicator*> CheckpointAxes::all() const {
  std::vector<Communicator*> axes{shard.get()};
  if (replicate) axes.push_back(replicate.get());
  return axes;
}

at::Tensor scatter_rows(const CheckpointAxes& axes, const MatrixPlace& place, const at::Tensor& owned) {
  const at::NoGradGuard no_grad;
  const auto here = axes.here();
  const bool owner = here == place.owner;
  if (owner) check_owned(place, owned);
  const int parts = axes.shard->size();
  const auto range = plan::row_range(place.rows, parts, here.shard);
  auto buffer = at::empty({largest_part(place.rows, parts) * place.cols}, place.options);
  if (parts == 1) {
    if (owner) buffer.copy_(owned.reshape({-1}));
  } else if (here.replicate == place.owner.replicate) {
    const OwnerSegment segment{place.owner.shard, buffer};
    const std::vector<std::vector<at::Tensor>> sent{owner ? parts_of(owned.detach(), parts)
                                                          : std::vector<at::Tensor>{}};
    axes.shard->scatter(std::span(&segment, 1), sent).wait();
  }
  if (axes.replicate && axes.replicate->size() > 1) {
    const OwnerSegment segment{place.owner.replicate, buffer};
    axes.replicate->broadcast(std::span(&segment, 1)).wait();
  }
  const auto rows = buffer.narrow(0, 0, range.count() * place.cols).view({range.count(), place.cols});
  return rows.numel() == buffer.numel() ? rows : rows.clone();
}

void gather_rows(const CheckpointAxes& axes, const MatrixPlace& place, const at::Tensor& rows,
                 const at::Tensor& owned) {
  const at::NoGradGuard no_grad;
  const auto here = axes.here();
  const bool owner = here == place.owner;
  const int parts = axes.shard->size();
  const std::vector<std::int64_t> sizes{plan::row_range(place.rows, parts, here.shard).count(), place.cols};
  TORCH_CHECK(rows.sizes() == sizes, "[dmuon.checkpoint] matrix '", place.name, "' of ", place.rows,
              " rows: expected rows of shape ", at::IntArrayRef(sizes), " on shard rank ", here.shard, ", found ",
              rows.sizes());
  if (owner) check_owned(place, owned);
  if (here.replicate != place.owner.replicate) return;
  const auto part_rows = largest_part(place.rows, parts);
  const auto mine = padded(rows.detach().to(place.options), part_rows).contiguous();
  if (parts == 1) {
    owned.detach().copy_(mine);
    return;
  }
  const bool in_place = place.rows % parts == 0 && owner && owned.is_contiguous();
  at::Tensor received;
  if (owner) {
    received = in_place ? owned.detach().view({parts, -1}) : at::empty({parts, part_rows * place.cols}, place.options);
  }
  const OwnerSegment segment{place.owner.shard, mine.view({-1})};
  axes.shard->gather(std::span(&segment, 1), {received}).wait();
  if (owner && !in_place) owned.detach().copy_(received.view({-1, place.cols}).narrow(0, 0, place.rows));
}

}  // namespace dmuon
