#include <cuda_runtime.h>

#include "kernels/peer_signal.h"

namespace dmuon::kernels {
namespace {

__device__ void store_release(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ std::uint64_t load_acquire(const std::uint64_t* from) {
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ std::uint64_t now() {
  std::uint64_t nanoseconds = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

__device__ int slot_of(Moment moment, int peer) { return static_cast<int>(moment) * kMaxPeers + peer; }

__device__ void fail(const SignalArgs& args, int kind, int peer, int* claimed) {
  if (atomicExch(claimed, 1) != 0) return;
  args.failure->peer = peer;
  args.failure->moment = static_cast<std::int32_t>(args.moment);
  args.failure->call = static_cast<std::uint32_t>(args.mark);
  __threadfence_system();
  *reinterpret_cast<volatile std::int32_t*>(&args.failure->kind) = kind;
  __threadfence_system();
  __trap();
}

__device__ void wait_for(const SignalArgs& args, int peer, int* claimed) {
  const std::uint64_t* slot = args.pads.pads[args.pads.rank] + slot_of(args.moment, peer);
  const std::uint64_t begin = now();
  for (unsigned pause = 32;; pause = pause < 1024 ? 2 * pause : pause) {
    const std::uint64_t seen = load_acquire(slot);
    if (seen == args.mark) return;
    // Nobody can be further than the call that we are in with him.
    const auto call = static_cast<std::uint32_t>(args.mark);
    if (static_cast<std::int32_t>(static_cast<std::uint32_t>(seen) - call) >= 0) return fail(args, 2, peer, claimed);
    if (now() - begin > args.nanoseconds) return fail(args, 1, peer, claimed);
    __nanosleep(pause);
  }
}

template <bool kSignals, bool kWaits>
__global__ void peer_kernel(const __grid_constant__ SignalArgs args) {
  __shared__ int claimed;
  if (threadIdx.x == 0) claimed = 0;
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= args.pads.ranks || peer == args.pads.rank) return;
  if (kSignals) {
    __threadfence_system();
    store_release(args.pads.pads[peer] + slot_of(args.moment, args.pads.rank), args.mark);
  }
  if (kWaits) wait_for(args, peer, &claimed);
}

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

FailureRecord::~FailureRecord() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

const char* FailureRecord::allocate() {
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, sizeof(WaitFailure), cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return text_of(error);
  }
  data_ = static_cast<WaitFailure*>(data);
  *data_ = {};
  return nullptr;
}

WaitFailure FailureRecord::read() const {
  if (data_ == nullptr) return {};
  const auto kind = __atomic_load_n(&data_->kind, __ATOMIC_ACQUIRE);
  return {kind, data_->peer, data_->moment, data_->call};
}

const char* load_signals() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, peer_kernel<true, false>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, peer_kernel<false, true>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, peer_kernel<true, true>);
  return text_of(error);
}

const char* signal(const SignalArgs& args, cudaStream_t stream) {
  peer_kernel<true, false><<<1, kMaxPeers, 0, stream>>>(args);
  return text_of(cudaGetLastError());
}

const char* wait(const SignalArgs& args, cudaStream_t stream) {
  peer_kernel<false, true><<<1, kMaxPeers, 0, stream>>>(args);
  return text_of(cudaGetLastError());
}

const char* signal_and_wait(const SignalArgs& args, cudaStream_t stream) {
  peer_kernel<true, true><<<1, kMaxPeers, 0, stream>>>(args);
  return text_of(cudaGetLastError());
}

}  // namespace dmuon::kernels
