#include "runtime/storage.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

namespace dmuon {

// torch has no device-generic call for this that is there without Python; the storage's own allocator is all it takes.
void resize_storage(const at::Tensor& tensor, std::int64_t bytes) {
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(storage.allocator() != nullptr, "[dmuon.runtime] a buffer on ", storage.device(),
              " has no allocator and cannot be freed and restored");
  const c10::DeviceGuard guard(storage.device());
  const auto size = static_cast<size_t>(bytes);
  storage.set_data_ptr_noswap(size == 0 ? at::DataPtr(nullptr, storage.device()) : storage.allocator()->allocate(size));
  storage.set_nbytes(size);
}

}  // namespace dmuon
