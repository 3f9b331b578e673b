// Vectors of the instruction set that this translation unit is compiled for.
//
// The kernels are written once and compiled once per instruction set, each time in a namespace of its own
// (PDSERVE_ISA). They work on blocks of 16 lanes whatever the width of a register, and sum each output in one fixed
// order, so that every instruction set with a fused multiply-add gives the same bits.
//
// Requires: nothing from the standard library is instantiated here, or the linker could keep a copy of it that
// needs instructions which the machine lacks.

#ifndef PDSERVE_KERNELS_VECTOR_H_
#define PDSERVE_KERNELS_VECTOR_H_

#include <cstddef>
#include <cstdint>

namespace pdserve::PDSERVE_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

constexpr int kBlockLanes = 16;
constexpr int kBlockVecs = kBlockLanes / kLanes;

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

#define PDSERVE_INLINE static inline __attribute__((always_inline))

PDSERVE_INLINE Vec Load(const float* from) {
  Vec value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

PDSERVE_INLINE void Store(float* to, Vec value) { __builtin_memcpy(to, &value, sizeof(value)); }

// Subtracting zero keeps the sign of a zero, so it costs nothing; adding it would not.
PDSERVE_INLINE Vec Splat(float value) { return value - Vec{}; }

PDSERVE_INLINE Vec Max(Vec a, Vec b) { return a > b ? a : b; }

// e^x with a relative error under 2e-7; exactly 1 at 0, exactly 0 below -87 (minus infinity included).
// Requires: x <= 88.
PDSERVE_INLINE Vec Exp(Vec x) {
  const Vec kLog2E = Splat(1.44269504088896341f);
  const Vec kRound = Splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const Vec kLowest = Splat(-87.0f);
  const IntVec underflows = x < kLowest;
  const Vec clamped = underflows ? kLowest : x;
  const Vec power = (clamped * kLog2E + kRound) - kRound;
  // ln 2 in two parts, so that the product with the first is exact.
  const Vec rest = (clamped - power * Splat(0.693359375f)) - power * Splat(-2.12194440e-4f);
  Vec series = Splat(1.9875691500e-4f);  // minimax coefficients of Cephes' expf
  series = series * rest + Splat(1.3981999507e-3f);
  series = series * rest + Splat(8.3334519073e-3f);
  series = series * rest + Splat(4.1665795894e-2f);
  series = series * rest + Splat(1.6666665459e-1f);
  series = series * rest + Splat(5.0000001201e-1f);
  series = series * (rest * rest) + rest + Splat(1.0f);
  const IntVec scale_bits = (__builtin_convertvector(power, IntVec) + 127) << 23;
  Vec scale;
  __builtin_memcpy(&scale, &scale_bits, sizeof(scale));
  return underflows ? Vec{} : series * scale;
}

// x / (1 + e^-x)
PDSERVE_INLINE Vec Silu(Vec x) {
  const Vec kHighest = Splat(88.0f);
  const Vec negated = -x;
  return x / (Splat(1.0f) + Exp(negated > kHighest ? kHighest : negated));
}

// The sum of 16 lanes, by halves: the same order at any width.
PDSERVE_INLINE float SumBlock(const Vec (&block)[kBlockVecs]) {
  float lanes[kBlockLanes];
  for (int v = 0; v < kBlockVecs; ++v) Store(lanes + v * kLanes, block[v]);
  for (int half = kBlockLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

}  // namespace pdserve::PDSERVE_ISA

#endif  // PDSERVE_KERNELS_VECTOR_H_
