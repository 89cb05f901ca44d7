// Freeing and restoring the memory behind a tensor that others hold views of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmuon {

/// Resizes the tensor's storage; views and tensors saved by autograd keep pointing at it.  New memory is allocated on
/// the current stream and not initialised.
void resize_storage(const at::Tensor& tensor, std::int64_t bytes);

}  // namespace dmuon
