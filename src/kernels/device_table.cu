#include <cuda_runtime.h>

#include <utility>

#include "kernels/device_table.h"

namespace dmuon::kernels {
namespace {

cudaError_t copy(void* to, const void* from, std::size_t bytes) {
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
  const cudaError_t waited = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return error == cudaSuccess ? waited : error;
}

}  // namespace

DeviceTable::DeviceTable(DeviceTable&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}

DeviceTable& DeviceTable::operator=(DeviceTable&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

DeviceTable::~DeviceTable() {
  if (data_ != nullptr) cudaFree(data_);
}

const char* DeviceTable::fill(const void* host, std::size_t bytes) {
  // Relaxed: another stream of this thread may be in capture.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaError_t error = data_ == nullptr ? cudaMalloc(&data_, bytes) : cudaErrorInvalidValue;
  if (error == cudaSuccess) error = copy(data_, host, bytes);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace dmuon::kernels
