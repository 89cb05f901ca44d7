// Writes a safetensors file (the format of Hugging Face models), tensor by tensor: no more than one is in memory.
//
// The file: 8 bytes little-endian length of the header, the header (JSON: dtype, shape and place of each tensor), the
// tensors' bytes one after another.  One process writes; local, no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace dmuon {

struct FileTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes;
};

/// The header, without the length before it, padded with spaces to a multiple of 8 bytes.
/// Throws c10::Error naming the tensor for a dtype that the format does not have.
[[nodiscard]] std::string safetensors_header(const std::vector<FileTensor>& tensors);

class SafetensorsWriter {
 public:
  /// Begins `path` under another name; it appears with `close`.  Throws c10::Error if it cannot be written.
  SafetensorsWriter(const std::string& path, std::vector<FileTensor> tensors);
  /// Removes what was written if `close` has not been called.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next tensor of the list, of any device and dtype; cast to the dtype of the list.  Throws c10::Error naming it
  /// for another shape.  What the system refuses (a full disk) is said by `close`: others may wait for the next tensor.
  void write(const at::Tensor& tensor);
  /// After the last tensor: the file appears.  Throws c10::Error if it could not be written or tensors are left.
  void close();

 private:
  std::string path_;
  std::string partial_;
  std::vector<FileTensor> tensors_;
  size_t next_ = 0;
  std::ofstream file_;
};

}  // namespace dmuon
