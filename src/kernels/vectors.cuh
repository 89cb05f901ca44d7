// Elements of any scalar type, four at a time where they are aligned.  For the elementwise kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace dmuon::kernels {

constexpr int kVector = 4;  // elements a thread takes at a time

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float(float x) {
  return x;
}
template <>
__device__ inline __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

template <class T>
struct alignas(kVector * sizeof(T)) Vector {
  T values[kVector];
};

// In one instruction each: what is assigned may be stored member by member.
template <class T>
__device__ Vector<T> load_vector(const T* from) {
  using Word = std::conditional_t<sizeof(Vector<T>) == 16, uint4, uint2>;
  const Word word = *reinterpret_cast<const Word*>(from);
  return *reinterpret_cast<const Vector<T>*>(&word);
}

template <class T>
__device__ void store_vector(T* to, const Vector<T>& values) {
  using Word = std::conditional_t<sizeof(Vector<T>) == 16, uint4, uint2>;
  __stwb(reinterpret_cast<Word*>(to), *reinterpret_cast<const Word*>(&values));
}

template <class T>
__device__ bool is_aligned(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Vector<T>) == 0;
}

}  // namespace dmuon::kernels
