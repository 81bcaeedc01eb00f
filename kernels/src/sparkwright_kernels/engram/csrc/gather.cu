// Copyright (c) Sparkwright contributors
// SPDX-License-Identifier: Apache-2.0
//
// Gathers packed Engram rows (256 fp8 e4m3fn codes, then 8 e8m0 exponents, 264 bytes) and dequantizes them to bf16; and
// enqueues the read of such rows on a stream. Plain C ABI: pointers and a stream, so no framework's ABI is involved.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kDim = 256;
constexpr int kCodesPerLane = kDim / 32;  // 8 bytes: rows are 264 bytes apart, so no wider load stays aligned
constexpr int kLanesPerExponent = 32 / kCodesPerLane;
constexpr int kWarps = 8;
constexpr unsigned kNanCodes = 0x7f7f7f7f;

// Where rows lie: `stride` bytes apart, or in groups (pages) `stride` bytes apart, each of `group` rows.
struct Dense {
  const uint8_t* base;
  int64_t stride;

  __device__ const uint8_t* operator[](uint32_t row) const { return base + row * stride; }
};

struct Paged {
  const uint8_t* base;
  int64_t stride;
  uint32_t group;
  int64_t row_stride;

  __device__ const uint8_t* operator[](uint32_t row) const {
    return base + row / group * stride + row % group * row_stride;
  }
};

struct Identity {
  __device__ int64_t operator[](int64_t i) const { return i; }
};

// An exponent's byte is the exponent field of a float: 0 is 0.0 and 255 is infinity, as in vLLM's lookup kernel.
__device__ uint4 dequantize(uint2 codes, uint32_t exponent) {
  const float scale = __uint_as_float(exponent << 23);
  const uint32_t words[2] = {codes.x, codes.y};
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto code = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (16 * (i % 2)));
    const float2 value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(code, __NV_E4M3)));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(value.x * scale, value.y * scale);
    pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// One warp gathers kRows rows at a time, all their loads in flight before the first use.
template <typename Rows, typename Index, int kRows>
__global__ void __launch_bounds__(32 * kWarps) gather(Rows rows, int64_t count, Index index, int64_t n, uint4* out) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kRows;
  for (int64_t first = warp * kRows; first < n; first += step) {
    int64_t row[kRows];
    uint2 codes[kRows];
    uint32_t exponent[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) row[j] = first + j < n ? index[first + j] : -1;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const unsigned absent = row[j] == -1 ? 0 : kNanCodes;  // a wrong index must not pass for an absent row
      codes[j] = make_uint2(absent, absent);
      exponent[j] = 127;
      if (row[j] >= 0 && row[j] < count) {
        const uint8_t* source = rows[static_cast<uint32_t>(row[j])];
        codes[j] = __ldcs(reinterpret_cast<const uint2*>(source) + lane);
        exponent[j] = __ldcs(source + kDim + lane / kLanesPerExponent);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (first + j < n) out[(first + j) * 32 + lane] = dequantize(codes[j], exponent[j]);
    }
  }
}

template <typename Rows, typename Index>
cudaError_t launch(Rows rows, int64_t count, Index index, int64_t n, void* out, int max_blocks, void* stream) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // Few rows: one a warp, so that they spread over the chip. Many: four, so that enough loads are in flight.
  const bool many = n >= int64_t{8} * kWarps * sms;
  const int64_t needed = (n + kWarps * (many ? 4 : 1) - 1) / (kWarps * (many ? 4 : 1));
  const int64_t limit = max_blocks > 0 ? max_blocks : 8 * sms;
  const dim3 grid(static_cast<unsigned>(needed < limit ? needed : limit));
  auto* target = static_cast<uint4*>(out);
  auto* on = static_cast<cudaStream_t>(stream);
  if (many) {
    gather<Rows, Index, 4><<<grid, 32 * kWarps, 0, on>>>(rows, count, index, n, target);
  } else {
    gather<Rows, Index, 1><<<grid, 32 * kWarps, 0, on>>>(rows, count, index, n, target);
  }
  return cudaGetLastError();
}

template <typename Rows>
cudaError_t launch(Rows rows, int64_t count, const void* index, int index_bytes, int64_t n, void* out, int max_blocks,
                   void* stream) {
  switch (index_bytes) {
    case 0: return launch(rows, count, Identity{}, n, out, max_blocks, stream);
    case 4: return launch(rows, count, static_cast<const int32_t*>(index), n, out, max_blocks, stream);
    case 8: return launch(rows, count, static_cast<const int64_t*>(index), n, out, max_blocks, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

// Enqueues the gather of n rows into out (bf16 [n, 256], 16-byte aligned) on stream; returns a cudaError_t.
// rows: device or pinned host memory, count of them (< 2^32) in groups of `group`, groups and rows so many bytes apart,
// all multiples of 8. index: device or pinned memory, index_bytes 4 or 8 (signed), or null and 0 for rows 0..n-1. Index
// -1 gives zeros, any other outside 0..count-1 NaN. max_blocks 0: as many as fill the device. Allocates nothing and
// never synchronizes, so it may be captured in a graph.
EXPORT int sparkwright_gather(const void* rows, int64_t count, int64_t group, int64_t group_stride, int64_t row_stride,
                              const void* index, int index_bytes, int64_t n, void* out, int max_blocks, void* stream) {
  if (n == 0) return cudaSuccess;
  if (n < 0 || count < 0 || count >> 32 || group < 1 || group >> 32) return cudaErrorInvalidValue;
  const auto* base = static_cast<const uint8_t*>(rows);
  if (group == 1) return launch(Dense{base, group_stride}, count, index, index_bytes, n, out, max_blocks, stream);
  const Paged paged{base, group_stride, static_cast<uint32_t>(group), row_stride};
  return launch(paged, count, index, index_bytes, n, out, max_blocks, stream);
}

// A batch of rows to read: run(job) fills the job's buffer, *status is then 0 or an errno. Must outlive every stream and
// graph that it was enqueued on.
struct sparkwright_read {
  void (*run)(void*);
  void* job;
  const int32_t* status;
  const char* what;  // for the message, should it fail
};

// A host function: reads, and ends the process if that fails. Nobody could be told in time: the rows' consumers are
// enqueued already, perhaps in a graph that no host code watches, and tokens would be sampled from them.
EXPORT void sparkwright_read_now(void* data) {
  const auto* read = static_cast<const sparkwright_read*>(data);
  read->run(read->job);
  if (*read->status == 0) return;
  std::fprintf(stderr, "%s: found %s, needed its rows; the engine ends, since rows are missing\n", read->what,
               std::strerror(*read->status));
  std::abort();
}

// Enqueues on stream: ids (height rows of width bytes, so many bytes apart) from the device to pinned memory, then the
// read of their rows. Returns a cudaError_t. May be captured in a graph.
EXPORT int sparkwright_read(void* ids, int64_t ids_pitch, const void* source, int64_t source_pitch, int64_t width,
                            int64_t height, sparkwright_read* read, void* stream) {
  auto* on = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      cudaMemcpy2DAsync(ids, ids_pitch, source, source_pitch, width, height, cudaMemcpyDeviceToHost, on);
  return error != cudaSuccess ? error : cudaLaunchHostFunc(on, sparkwright_read_now, read);
}

// The device's address of the device or pinned host memory at pointer; 0 if the device cannot read it.
EXPORT uint64_t sparkwright_device_pointer(const void* pointer) {
  cudaPointerAttributes found;
  if (cudaPointerGetAttributes(&found, pointer) != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it
    return 0;
  }
  return found.type == cudaMemoryTypeUnregistered ? 0 : reinterpret_cast<uint64_t>(found.devicePointer);
}

EXPORT const char* sparkwright_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
