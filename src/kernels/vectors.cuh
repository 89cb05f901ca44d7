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

// Elements [i, i + 4) of a contiguous array, zero past the end; kWhole: there is an aligned vector.  Not yet converted,
// which would wait for them.
template <bool kWhole, class T>
__device__ Vector<T> load(const T* x, std::int64_t i, std::int64_t numel) {
  Vector<T> packed;
  if constexpr (kWhole) {
    packed = load_vector(x + i);
  } else {
    for (int j = 0; j < kVector; ++j) packed.values[j] = i + j < numel ? x[i + j] : from_float<T>(0.0F);
  }
  return packed;
}

template <class T>
__device__ float4 to_floats(const Vector<T>& v) {
  return make_float4(to_float(v.values[0]), to_float(v.values[1]), to_float(v.values[2]), to_float(v.values[3]));
}

template <class T>
__device__ Vector<T> from_floats(const float4& v) {
  return {from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z), from_float<T>(v.w)};
}

template <bool kWhole, class T>
__device__ void save(T* x, std::int64_t i, std::int64_t numel, const float4& v) {
  const Vector<T> packed = from_floats<T>(v);
  if constexpr (kWhole) {
    store_vector(x + i, packed);
  } else {
    for (int j = 0; j < kVector && i + j < numel; ++j) x[i + j] = packed.values[j];
  }
}

}  // namespace dmuon::kernels
