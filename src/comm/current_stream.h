// The current CUDA stream without a CUDA header.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

struct CUstream_st;

namespace dmuon {

/// Of the calling thread on `device`, a CUDA device.
[[nodiscard]] inline CUstream_st* current_stream(const c10::Device& device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return static_cast<CUstream_st*>(stream.native_handle());
}

}  // namespace dmuon
