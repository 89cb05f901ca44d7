// A constant table in device memory, apart from torch's allocator: it may be filled while a stream is being captured,
// and no queued kernel can still use its memory.  Raw memory: no torch and no CUDA header.
#pragma once

#include <cstddef>

namespace dmuon::kernels {

class DeviceTable {
 public:
  DeviceTable() = default;
  DeviceTable(DeviceTable&& other) noexcept;
  DeviceTable& operator=(DeviceTable&& other) noexcept;
  ~DeviceTable();  ///< waits for the device

  /// Copies to the current device and waits for the copy, not for the work that is queued there.  Returns nullptr, or
  /// CUDA's text for what went wrong.
  [[nodiscard]] const char* fill(const void* host, std::size_t bytes);

  [[nodiscard]] const void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace dmuon::kernels
