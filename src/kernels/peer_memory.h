// Device memory that another process of the same host can map (CUDA IPC), and what two processes must know about each
// other to try.  Raw memory: no torch and no CUDA header.
//
// Every function works on the current device of the calling thread, blocks the host, and is for set-up.  Errors come
// back as CUDA's text and leave no CUDA error behind; nullptr is success.
#pragma once

#include <cstddef>
#include <string>

namespace dmuon::kernels {

/// Memory of this process.  Move-only.
class ExportedMemory {
 public:
  ExportedMemory() = default;
  ExportedMemory(const ExportedMemory&) = delete;
  ExportedMemory& operator=(const ExportedMemory&) = delete;
  ~ExportedMemory();  ///< waits for the device; a peer that has it mapped must not use it any more

  /// At least `bytes`, all zero.
  [[nodiscard]] const char* allocate(std::size_t bytes);
  /// What a peer opens it with: hexadecimal text.
  [[nodiscard]] const char* handle(std::string& text) const;
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// Memory of a peer, mapped here.  Move-only.
class ImportedMemory {
 public:
  ImportedMemory() = default;
  ImportedMemory(ImportedMemory&& other) noexcept;
  ImportedMemory& operator=(ImportedMemory&& other) noexcept;
  ~ImportedMemory();  ///< unmaps it

  [[nodiscard]] const char* open(const std::string& handle);
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// The device's UUID, hexadecimal: the same in every process and container.
[[nodiscard]] const char* device_uuid(std::string& uuid);

/// Whether the device with this UUID is visible here and cannot be reached from the current one ("" when it can, or
/// when only opening its memory will tell).
[[nodiscard]] std::string unreachable(const std::string& uuid);

/// Blocking copies of a few bytes, through the device's copy engine: `from` may be a peer's memory.
[[nodiscard]] const char* write_bytes(void* to, const void* host, std::size_t bytes);
[[nodiscard]] const char* read_bytes(void* host, const void* from, std::size_t bytes);

/// Queues a copy from a peer's memory on `stream`, a cudaStream_t.  Not a set-up call: does not block.
[[nodiscard]] const char* pull(void* to, const void* from, std::size_t bytes, void* stream);

}  // namespace dmuon::kernels
