#include <cuda_runtime.h>

#include <cstring>
#include <utility>

#include "kernels/peer_memory.h"

namespace dmuon::kernels {
namespace {

// Small allocations share pages, and a handle opens the whole page: none of ours lies beside another's.
constexpr std::size_t kPage = std::size_t{2} << 20;

const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  static_cast<void>(cudaGetLastError());  // the next call of anybody must not find it
  return cudaGetErrorString(error);
}

std::string to_hex(const void* data, std::size_t bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

bool from_hex(const std::string& text, void* data, std::size_t bytes) {
  if (text.size() != 2 * bytes) return false;
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (std::size_t i = 0; i < bytes; ++i) {
    static_cast<unsigned char*>(data)[i] = static_cast<unsigned char>(16 * digit(text[2 * i]) + digit(text[2 * i + 1]));
  }
  return true;
}

// On a stream of its own: nothing waits for what others have queued, and nothing is waited for.
cudaError_t copy(void* to, const void* from, std::size_t bytes) {
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  const cudaError_t waited = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return error == cudaSuccess ? waited : error;
}

}  // namespace

ExportedMemory::~ExportedMemory() {
  if (data_ != nullptr) static_cast<void>(text_of(cudaFree(data_)));
}

const char* ExportedMemory::allocate(std::size_t bytes) {
  const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
  cudaError_t error = data_ == nullptr ? cudaMalloc(&data_, size == 0 ? kPage : size) : cudaErrorInvalidValue;
  if (error == cudaSuccess) error = cudaMemset(data_, 0, size == 0 ? kPage : size);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return text_of(error);
}

const char* ExportedMemory::handle(std::string& text) const {
  cudaIpcMemHandle_t handle;
  const cudaError_t error = cudaIpcGetMemHandle(&handle, data_);
  if (error == cudaSuccess) text = to_hex(&handle, sizeof(handle));
  return text_of(error);
}

ImportedMemory::ImportedMemory(ImportedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}

ImportedMemory& ImportedMemory::operator=(ImportedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  return *this;
}

ImportedMemory::~ImportedMemory() {
  if (data_ != nullptr) static_cast<void>(text_of(cudaIpcCloseMemHandle(data_)));
}

const char* ImportedMemory::open(const std::string& text) {
  cudaIpcMemHandle_t handle;
  if (data_ != nullptr || !from_hex(text, &handle, sizeof(handle))) return "not a handle";
  return text_of(cudaIpcOpenMemHandle(&data_, handle, cudaIpcMemLazyEnablePeerAccess));
}

const char* device_uuid(std::string& uuid) {
  int device = 0;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) uuid = to_hex(&properties.uuid, sizeof(properties.uuid));
  return text_of(error);
}

std::string unreachable(const std::string& uuid) {
  int own = 0;
  int count = 0;
  const char* problem = text_of(cudaGetDevice(&own));
  if (problem == nullptr) problem = text_of(cudaGetDeviceCount(&count));
  if (problem != nullptr) return problem;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (const char* failed = text_of(cudaGetDeviceProperties(&properties, device))) return failed;
    if (to_hex(&properties.uuid, sizeof(properties.uuid)) != uuid) continue;
    if (device == own) return "it is the same GPU";
    int can = 0;
    if (const char* failed = text_of(cudaDeviceCanAccessPeer(&can, own, device))) return failed;
    return can != 0 ? "" : "no peer access from GPU " + std::to_string(own) + " to GPU " + std::to_string(device);
  }
  return "";
}

const char* write_bytes(void* to, const void* host, std::size_t bytes) { return text_of(copy(to, host, bytes)); }

const char* read_bytes(void* host, const void* from, std::size_t bytes) {
  void* here = nullptr;
  cudaError_t error = cudaMalloc(&here, bytes);
  if (error == cudaSuccess) error = copy(here, from, bytes);
  if (error == cudaSuccess) error = copy(host, here, bytes);
  if (here != nullptr) cudaFree(here);
  return text_of(error);
}

const char* pull(void* to, const void* from, std::size_t bytes, void* stream) {
  return text_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}

}  // namespace dmuon::kernels
