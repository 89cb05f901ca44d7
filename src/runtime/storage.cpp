#include "runtime/storage.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace dmuon {

// inductor's operator is the only device-generic way to resize a storage from C++; FSDP2 does the same from Python.
void resize_storage(const at::Tensor& tensor, std::int64_t bytes) {
  static const auto resize = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("inductor::resize_storage_bytes_", "")
                                 .typed<void(const at::Tensor&, c10::SymInt)>();
  resize.call(tensor, bytes);
}

}  // namespace dmuon
