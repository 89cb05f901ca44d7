// Runs a work list of dependent fp16 matrix products on a Hopper GPU (compute capability 9.0) in one launch.
// Raw pointers and a stream: no torch and no CUDA header.
//
// Results do not depend on the widths of the tiles, on the place of an item in the list or on what else is in it: every
// element is one fp32 sum over the depth index in rising order, and of a symmetric product only i >= j is computed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile_work.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;  // as CUDA declares it

namespace dmuon::kernels {

inline constexpr std::size_t kTensorMapBytes = 128;

/// A row-major 16-bit matrix in device memory.  The address is 16-byte aligned, ld a multiple of 8.
struct TensorMapSpec {
  const void* address = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t ld = 0;  ///< elements from one row to the next
};

inline constexpr int kMaxResults = 16;

/// An entry of the table of tensors.
struct alignas(64) TensorMap {
  std::uint8_t bytes[kTensorMapBytes];
};

/// Host memory.  Returns nullptr, or CUDA's text for what went wrong.
[[nodiscard]] const char* encode_tensor_map(const TensorMapSpec& spec, TensorMap& out);

/// All pointers are to device memory of the current device, and must live until the stream has passed the launch.
struct TileProductArgs {
  const TileOp* ops = nullptr;
  const WorkItem* items = nullptr;
  std::int32_t item_count = 0;
  const void* tensor_maps = nullptr;  ///< 64-byte aligned
  std::int32_t* counters = nullptr;   ///< zero; the last of them is the ticket counter
  std::int32_t counter_count = 0;
  TensorMap results[kMaxResults] = {};  ///< of the tensors from kResultTensors on
};

/// True if the current device can run tile products and this build has the code for it.
[[nodiscard]] bool tile_products_supported();

/// Queues the list on `stream`.  Returns nullptr, or CUDA's text for a failed launch.
[[nodiscard]] const char* run_tile_products(const TileProductArgs& args, cudaStream_t stream);

}  // namespace dmuon::kernels
